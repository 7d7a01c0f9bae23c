"""What an algorithm costs in loss: 4 ranks, equal steps, the validation loss against gradient_allreduce's.

A byte-level GPT with Adam and a CNN on scikit-learn's digits with SGD and momentum, 3 seeds each; after
model.consensus(). A ratio compares runs of one seed, which begin alike and see the same batches. QAdam is compared
with gradient_allreduce under torch.optim.Adam. Ranks are threads over Gloo.
"""

import sys
from functools import partial
from typing import Any

import tasks
import torch
from harness import arguments
from torch import nn
from trainings import Case, final_loss, report_losses, with_peak

import gossamer as gs

WARMUP_SHARE = 0.25  # of the steps, for QAdam
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
CALM_OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)
INT4, INT2, ONEBIT = (gs.ErrorFeedback(codec) for codec in (gs.Int4(), gs.Int2(), gs.OneBit()))


def with_adam(task: tasks.Task, model: nn.Module, _steps: int) -> list[Any]:
    return [with_peak(tasks.adam(list(model.parameters())), task.adam_lr)]


def with_qadam(task: tasks.Task, model: nn.Module, steps: int) -> list[Any]:
    warmup = max(1, int(WARMUP_SHARE * steps))
    return [with_peak(gs.QAdamOptimizer(model.parameters(), warmup_steps=warmup), task.adam_lr)]


BASELINE = Case("gradient_allreduce", gs.GradientAllReduce)
ADAM_BASELINE = Case("gradient_allreduce, Adam", gs.GradientAllReduce, optimizers=with_adam)
CASES = (
    Case("bytegrad", gs.ByteGrad, 1.01),
    Case("Int4 + EF", lambda: gs.GradientAllReduce(codec=INT4), 1.01),
    Case("Adaptive(Int4 + EF)", lambda: gs.GradientAllReduce(codec=gs.Adaptive(INT4))),
    Case("Int4", lambda: gs.GradientAllReduce(codec=gs.Int4())),
    Case("Int2 + EF", lambda: gs.GradientAllReduce(codec=INT2)),
    Case("OneBit + EF", lambda: gs.GradientAllReduce(codec=ONEBIT)),
    Case("Adaptive(OneBit + EF)", lambda: gs.GradientAllReduce(codec=gs.Adaptive(ONEBIT))),
    Case("TopK(0.01) + EF", lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.TopK(0.01)))),
    Case("PowerSGD(4)", lambda: gs.PowerSGD(4)),
    Case("decentralized, all", lambda: gs.Decentralized("all")),
    Case("decentralized, ring", lambda: gs.Decentralized("ring")),
    Case("decentralized, one_peer_exponential", lambda: gs.Decentralized("one_peer_exponential")),
    Case("decentralized, base_graph", lambda: gs.Decentralized("base_graph")),
    Case("low_precision_decentralized, Int8", lambda: gs.LowPrecisionDecentralized(gs.Int8())),
    Case("low_precision_decentralized, Int4", lambda: gs.LowPrecisionDecentralized(gs.Int4())),
    Case(
        "low_precision_decentralized, Int4, gamma 0.5",
        lambda: gs.LowPrecisionDecentralized(gs.Int4(), gamma=0.5),
    ),
    Case("async", lambda: gs.AsyncModelAverage(sync_interval_ms=1)),
    Case("LocalSGD(8)", lambda: gs.LocalSGD(8)),
    Case("DiLoCo(8)", lambda: gs.LocalSGD(8, OUTER)),
    Case("DiLoCo(8), outer momentum 0.5", lambda: gs.LocalSGD(8, CALM_OUTER)),
    Case(
        "streaming DiLoCo(8), Int4 + EF",
        lambda: gs.LocalSGD(8, OUTER, fragments=2, delay=1, merge=0.5, codec=INT4),
    ),
    Case("qadam", gs.QAdam, 1.01, with_qadam),
)


def compare(task: tasks.Task, seeds: int, steps: int, only: str) -> None:
    cases = [case for case in CASES if any(part in case.name for part in only.split(","))]
    adam = BASELINE if task.optimizer is tasks.adam else ADAM_BASELINE
    baselines = list(dict.fromkeys((BASELINE, adam)))
    losses: dict[str, list[float]] = {}
    for case in (*baselines, *cases):
        losses[case.name] = [final_loss(task, case, seed, steps) for seed in range(seeds)]
        if case in baselines:
            continue
        baseline = adam if case.optimizers is with_qadam else BASELINE
        peer = baseline.name, losses[baseline.name]
        report_losses(case.name, task, steps, losses[case.name], peer, case.at_most)


def main() -> int:
    options = arguments(
        __doc__, only=("", "parts of the names of the algorithms to run, with commas between")
    )
    torch.set_num_threads(1)
    for make in (tasks.text, tasks.digits):
        try:
            task = make()
        except ImportError:
            print("convergence: the digits need scikit-learn; pip install scikit-learn", file=sys.stderr)
            return 0 if options.quick else 1
        seeds, steps = (1, 4) if options.quick else (3, task.steps)
        # For a check it is enough to run all of them once, on the smaller model.
        only = "bytegrad" if options.quick and make is tasks.text else options.only
        compare(task, seeds, steps, only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
