# One rank of `gossamer bench network`: `python -m gossamer.netlab.comparison.worker JOB.json` on a host.
# It joins the other ranks and does what the job says; rank 0 writes the figures. command.py writes the job and reads
# the figures.
"""The ranks of ``gossamer bench network``."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gossamer import runtime
from gossamer.netlab.comparison import loss, steps
from gossamer.netlab.comparison.tasks import TASKS
from gossamer.netlab.comparison.variants import Setting


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
