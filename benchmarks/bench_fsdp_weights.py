"""FSDP2's weights in few bits: the bytes of all gathers of a step, and the loss, against exact gathers.

The GPT of bench_convergence.py, 4 ranks as processes over Gloo, each block sharded, equal steps, 3 seeds. Gradients are
exact, so what differs is the weights with which layers compute. The loss is that of the optimizer's exact weights. A
ratio compares runs of one seed; a target is the spread of the exact runs over the seeds.
"""

import copy
import statistics
import sys
from typing import Any

import tasks
import torch
from harness import arguments, paired, report, run_processes, serve
from torch.distributed.device_mesh import init_device_mesh
from trainings import report_losses

import gossamer as gs
from gossamer.comm import from_group
from gossamer.netlab.comparison.variants import sharded

EXACT = "float32"
WEIGHTS = {
    EXACT: gs.Identity(),
    "BF16": gs.BF16(),
    "Int8": gs.Int8(),
    "Int4": gs.Int4(),
    "Delta(Int8)": gs.Delta(gs.Int8()),
    "Delta(Int4)": gs.Delta(gs.Int4()),
    "Delta(Int2)": gs.Delta(gs.Int2()),
}


def train(weights: str, seed: int, steps: int) -> dict[str, Any]:
    """Trains on this rank. Returns the validation loss, and the mean bytes that a rank sends for weights in a step."""
    task = tasks.text()
    torch.manual_seed(seed)
    plain = task.model()
    mesh = init_device_mesh("cpu", (gs.size(),))
    model = sharded(copy.deepcopy(plain), mesh)
    gs.fsdp.compress(model, None, weights=WEIGHTS[weights])
    optimizer = task.optimizer(list(model.parameters()))
    comm, sent = from_group(mesh.get_group(), "cpu"), 0
    for step in range(steps):
        if step == 2:  # the first gather of a Delta is exact
            sent = comm.bytes_sent
        for group in optimizer.param_groups:
            group["lr"] = tasks.learning_rate(task.peak_lr, step, steps)
        optimizer.zero_grad()
        batch = [part.chunk(gs.size())[gs.rank()] for part in task.batch((seed << 32) + step)]
        model(*batch).backward()
        optimizer.step()
    sent = comm.bytes_sent - sent
    plain.load_state_dict(
        {name: param.full_tensor() for name, param in model.named_parameters()}, strict=False
    )
    with torch.no_grad():
        return {"loss": plain(*task.validation).item(), "sent": sent / max(1, steps - 2)}


def main() -> int:
    options = arguments(__doc__)
    if serve(options, train):
        return 0
    task = tasks.text()
    seeds, ranks, steps = (1, 2, 5) if options.quick else (3, 4, task.steps)
    names = (EXACT, "Delta(Int4)") if options.quick else WEIGHTS
    found = {
        name: [run_processes(ranks, {"weights": name, "seed": seed, "steps": steps}) for seed in range(seeds)]
        for name in names
    }
    exact, whole = ([each[what] for each in found[EXACT]] for what in ("loss", "sent"))
    spread = round(max(exact) / min(exact), 4)
    for name, runs in found.items():
        sent, losses = ([each[what] for each in runs] for what in ("sent", "loss"))
        report(
            f"bytes sent for weights, FSDP2 with weights in {name}, {ranks} ranks, {steps} steps",
            statistics.median(sent),
            "bytes",
            baseline=(EXACT, statistics.median(whole)),
            ratio=statistics.median(paired(sent, whole)),
            samples=sent,
        )
        report_losses(f"FSDP2 with weights in {name}", task, steps, losses, (EXACT, exact), spread, ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
