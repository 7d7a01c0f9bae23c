"""The loss of SparseLoCo against dense DiLoCo's: the GPT of bench_convergence.py, 4 ranks, 1,600 steps, H 15, 30, 100.

DiLoCo sends float32, and its outer momentum is 0.9 as in its paper, or 0.5, which short trainings prefer. The ratio
compares a seed with DiLoCo's better of the two. SparseLoCo has its paper's settings, or an outer learning rate of 2,
which short trainings prefer. Ranks are threads over Gloo.
"""

import statistics
import sys
from functools import partial

import tasks
import torch
from bench_convergence import BASELINE, CALM_OUTER, OUTER
from harness import arguments, report
from trainings import RANKS, Case, final_loss, report_losses

import gossamer as gs

PERIODS = (15, 30, 100)


def cases(period: int) -> tuple[Case, ...]:
    sparse = partial(gs.LocalSGD, period, codec=gs.ChunkTopK())
    twice = partial(torch.optim.SGD, lr=2.0)
    return (
        Case(f"DiLoCo({period}), outer momentum 0.9", lambda: gs.LocalSGD(period, OUTER)),
        Case(f"DiLoCo({period}), outer momentum 0.5", lambda: gs.LocalSGD(period, CALM_OUTER)),
        Case(f"SparseLoCo({period})", partial(sparse, error_decay=0.95)),
        Case(
            f"SparseLoCo({period}), outer learning rate 2",
            partial(sparse, outer_optimizer=twice, error_decay=0.99),
        ),
    )


def compare(task: tasks.Task, seeds: int, steps: int, period: int) -> None:
    diloco, calm, *sparse = cases(period)
    losses = {
        case.name: [final_loss(task, case, seed, steps) for seed in range(seeds)]
        for case in (diloco, calm, *sparse)
    }
    best = [min(pair) for pair in zip(losses[diloco.name], losses[calm.name], strict=True)]
    for case in (diloco, calm, *sparse):
        at_most = 1.0 if case in sparse else None
        report_losses(case.name, task, steps, losses[case.name], ("the better DiLoCo", best), at_most)


def main() -> int:
    options = arguments(__doc__, steps=(1600, "steps of a training"))
    torch.set_num_threads(1)
    task = tasks.text()
    seeds, steps = (1, 30) if options.quick else (3, int(options.steps))
    every_step = [final_loss(task, BASELINE, seed, steps) for seed in range(seeds)]
    report(
        f"validation loss of gradient_allreduce, {task.name}, {RANKS} ranks, {steps} steps",
        statistics.median(every_step),
        "nats",
        samples=every_step,
    )
    for period in PERIODS[1:2] if options.quick else PERIODS:
        compare(task, seeds, steps, period)
    return 0


if __name__ == "__main__":
    sys.exit(main())
