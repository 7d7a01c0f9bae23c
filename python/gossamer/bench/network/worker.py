# One rank of `gossamer bench network`, as netlab starts it on a host: python -m gossamer.bench.network.worker JOB.json.
# It joins the others, does what the job says, and rank 0 writes the figures. command.py writes the job and reads them.
"""The ranks of ``gossamer bench network``."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gossamer import runtime
from gossamer.bench.network import loss, steps
from gossamer.bench.network.tasks import TASKS
from gossamer.bench.network.variants import Setting


def work(job: dict[str, Any]) -> None:
    """`job` is what command.py makes of its options."""
    runtime.init(backend="gloo", timeout_s=job["timeout_s"])
    group = dist.new_group(backend=job["backend"])
    task = TASKS[job["model"]]()
    setting = Setting(group, job["ranks_per_host"], job["lr"] or task.lr)
    rows = job["rows"] or task.rows
    found: Any
    if job["to_loss"]:
        found = loss.measure(task, job, setting, rows=rows)
    else:
        found = steps.measure(task, job["algorithms"], setting, rows=rows, rounds=job["rounds"])
    if runtime.rank() == 0:
        parameters = sum(each.numel() for each in task.model().parameters())
        about = {"parameters": parameters, "rows": rows, "lr": setting.lr}
        Path(job["result"]).write_text(json.dumps({"about": about, "found": found}))
    gc.collect()  # a wrapper in a reference cycle would keep the group's threads alive into interpreter exit
    runtime.shutdown()


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text()))
