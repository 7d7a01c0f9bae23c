"""MuLoCo: DiLoCo with Muon as the inner optimizer of matrices, and 4-bit or 2-bit outer changes.

The GPT of bench_convergence.py, 8 ranks as threads over Gloo, equal steps, H 15 and 30, outer momentum 0.5. Muon trains
the matrices of the blocks, AdamW the rest. The ratio compares a seed with MuLoCo's float32 changes; a target is the
spread of those over the seeds. DiLoCo with AdamW is there with the same changes. Learning rates are those of the lowest
loss with float32 changes, H 15 and seed 0, among 1, 2, 4 and 8 times the task's; for Muon also 16 and 32 times.
"""

import statistics
import sys
from functools import partial
from typing import Any

import tasks
import torch
from bench_convergence import CALM_OUTER
from harness import arguments
from torch import nn
from trainings import Case, Trained, report_losses, train, with_peak

import gossamer as gs

RANKS = 8
PERIODS = (15, 30)
CODECS = {"float32": None, "Int4": gs.ErrorFeedback(gs.Int4()), "Int2": gs.ErrorFeedback(gs.Int2())}


def with_muon(task: tasks.Task, model: nn.Module, _steps: int) -> list[Any]:
    matrices, others = [], []
    for name, param in model.named_parameters():
        (matrices if param.dim() == 2 and name.startswith("blocks.") else others).append(param)
    muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, weight_decay=0.0)
    return [with_peak(muon, 8 * task.adam_lr), with_peak(adamw, task.adam_lr)]


def with_adamw(task: tasks.Task, model: nn.Module, _steps: int) -> list[Any]:
    return [with_peak(torch.optim.AdamW(model.parameters(), weight_decay=0.0), 2 * task.adam_lr)]


def main() -> int:
    options = arguments(__doc__, steps=(0, "steps of a training; 0: those of the task"))
    torch.set_num_threads(1)
    task = tasks.text()
    seeds, ranks, steps = (1, 2, 15) if options.quick else (3, RANKS, int(options.steps) or task.steps)
    inner = {"MuLoCo": with_muon, "DiLoCo": with_adamw}
    for period in PERIODS[:1] if options.quick else PERIODS:
        found: dict[str, list[Trained]] = {}
        for method, optimizers in inner.items():
            for changes, codec in CODECS.items():
                algorithm = partial(gs.LocalSGD, period, CALM_OUTER, codec=codec)
                case = Case(f"{method}({period}), {changes}", algorithm, optimizers=optimizers)
                found[case.name] = [train(task, case, seed, steps, ranks) for seed in range(seeds)]
        losses = {name: [each.loss for each in trained] for name, trained in found.items()}
        peer = losses[f"MuLoCo({period}), float32"]
        for name, trained in found.items():
            at_most = round(max(peer) / min(peer), 4) if name.startswith("MuLoCo") else None
            sent = round(statistics.median(each.sent_bytes for each in trained))
            against = "MuLoCo, float32", peer
            report_losses(name, task, steps, losses[name], against, at_most, ranks, bytes=sent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
