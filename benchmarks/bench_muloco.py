"""MuLoCo: DiLoCo with Muon as the inner optimizer of matrices, and 4-bit or 2-bit outer changes.

The GPT of bench_convergence.py, 8 ranks as threads over Gloo, equal steps, H 15 and 30, outer momentum 0.5. Muon trains
the matrices of the blocks, AdamW the rest. The ratio compares a seed with MuLoCo's float32 changes; a target is the
spread of those over the seeds. DiLoCo with AdamW is there with the same changes. Learning rates are those of the lowest
loss with float32 changes, H 15 and seed 0, among 1, 2, 4 and 8 times the task's; for Muon also 16 and 32 times.
"""

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import tasks
import torch
from bench_convergence import CALM_OUTER
from harness import arguments, paired, report
from torch import nn
from trainings import Case, Trained, train, with_peak

import gossamer as gs

RANKS = 8
PERIODS = (15, 30)
CODECS = {"float32": None, "Int4": gs.ErrorFeedback(gs.Int4()), "Int2": gs.ErrorFeedback(gs.Int2())}


def with_muon(task: tasks.Task, model: nn.Module, _steps: int) -> list[Any]:
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    matrices = [param for name, param in named if param.dim() == 2 and name.startswith("blocks.")]
    others = [param for _, param in named if not any(param is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, weight_decay=0.0)
    return [with_peak(muon, 8 * task.adam_lr), with_peak(adamw, task.adam_lr)]


def with_adamw(task: tasks.Task, model: nn.Module, _steps: int) -> list[Any]:
    return [with_peak(torch.optim.AdamW(model.parameters(), weight_decay=0.0), 2 * task.adam_lr)]


def show(
    name: str,
    task: tasks.Task,
    steps: int,
    found: Sequence[Trained],
    peer: Sequence[Trained],
    at_most: float | None,
) -> None:
    losses, others = [each.loss for each in found], [each.loss for each in peer]
    ratios = paired(losses, others)
    report(
        f"validation loss of {name}, {task.name}, {RANKS} ranks, {steps} steps",
        statistics.median(losses),
        "nats",
        baseline=("MuLoCo, float32", statistics.median(others)),
        ratio=statistics.median(ratios),
        at_most=at_most,
        target_of="ratio",
        samples=losses,
        ratios=[round(ratio, 4) for ratio in ratios],
        bytes=round(statistics.median(each.sent_bytes for each in found)),
    )


def main() -> int:
    options = arguments(__doc__, steps=(0, "steps of a training; 0: those of the task"))
    torch.set_num_threads(1)
    task = tasks.text()
    seeds, steps = (1, 30) if options.quick else (3, int(options.steps) or task.steps)
    inner = {"MuLoCo": with_muon, "DiLoCo": with_adamw}
    for period in PERIODS[:1] if options.quick else PERIODS:
        found: dict[str, list[Trained]] = {}
        for method, optimizers in inner.items():
            for changes, codec in CODECS.items():
                algorithm = partial(gs.LocalSGD, period, CALM_OUTER, codec=codec)
                case = Case(f"{method}({period}), {changes}", algorithm, optimizers=optimizers)
                found[case.name] = [train(task, case, seed, steps, RANKS) for seed in range(seeds)]
        peer = found[f"MuLoCo({period}), float32"]
        spread = max(each.loss for each in peer) / min(each.loss for each in peer)
        for name, each in found.items():
            bound = round(spread, 4) if name.startswith("MuLoCo") else None
            show(name, task, steps, each, peer, bound)
    return 0


if __name__ == "__main__":
    sys.exit(main())
