"""What an algorithm costs in loss: 4 ranks, equal steps, the validation loss against gradient_allreduce's.

A byte-level GPT with Adam and a CNN on scikit-learn's digits with SGD and momentum, 3 seeds each; after
model.consensus(). A ratio compares runs of one seed, which begin alike and see the same batches. QAdam is compared
with gradient_allreduce under torch.optim.Adam. Ranks are threads over Gloo.
"""

import copy
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import tasks
import torch
from harness import arguments, paired, report, run_threads

import gossamer as gs

RANKS = 4
WARMUP_SHARE = 0.25  # of the steps, for QAdam
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
CALM_OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)
INT4, ONEBIT = gs.ErrorFeedback(gs.Int4()), gs.ErrorFeedback(gs.OneBit())


@dataclass(frozen=True)
class Case:
    """An algorithm. `adam`: it trains both tasks with Adam; QAdam trains them with its own optimizer."""

    name: str
    algorithm: Callable[[], gs.Algorithm]
    at_most: float | None = None
    adam: bool = False


BASELINE = Case("gradient_allreduce", gs.GradientAllReduce)
ADAM_BASELINE = Case("gradient_allreduce, Adam", gs.GradientAllReduce, adam=True)
CASES = (
    Case("bytegrad", gs.ByteGrad, 1.01),
    Case("Int4 + EF", lambda: gs.GradientAllReduce(codec=INT4), 1.01),
    Case("Adaptive(Int4 + EF)", lambda: gs.GradientAllReduce(codec=gs.Adaptive(INT4))),
    Case("Int4", lambda: gs.GradientAllReduce(codec=gs.Int4())),
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
    Case("qadam", gs.QAdam, 1.01, adam=True),
)


def final_loss(task: tasks.Task, case: Case, seed: int, steps: int) -> float:
    """The validation loss after `steps` steps of all ranks and consensus()."""
    torch.manual_seed(seed)
    start = task.model()

    def body(comm: Any, _backend: Any) -> float:
        model = copy.deepcopy(start)
        algorithm, params = case.algorithm(), list(model.parameters())
        if isinstance(algorithm, gs.QAdam):
            optimizer = gs.QAdamOptimizer(params, warmup_steps=max(1, int(WARMUP_SHARE * steps)))
        else:
            optimizer = tasks.adam(params) if case.adam else task.optimizer(params)
        buckets = {"bucket_bytes": task.bucket_bytes, "first_bucket_bytes": task.bucket_bytes}
        wrapped = gs.DataParallel(model, optimizer, algorithm=algorithm, process_group=comm, **buckets)
        peak = task.adam_lr if case.adam else task.peak_lr
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = tasks.learning_rate(peak, step, steps)
            batch = [part.chunk(RANKS)[comm.rank] for part in task.batch((seed << 32) + step)]
            optimizer.zero_grad()
            wrapped(*batch).backward()
            optimizer.step()
        wrapped.consensus()
        wrapped.close()
        with torch.no_grad():
            return model(*task.validation).item() if comm.rank == 0 else 0.0

    return run_threads(RANKS, body)[0]


def compare(task: tasks.Task, seeds: int, steps: int, only: str) -> None:
    cases = [case for case in CASES if any(part in case.name for part in only.split(","))]
    baselines = {False: BASELINE, True: BASELINE if task.optimizer is tasks.adam else ADAM_BASELINE}
    losses: dict[str, list[float]] = {}
    for case in (*dict.fromkeys(baselines.values()), *cases):
        losses[case.name] = [final_loss(task, case, seed, steps) for seed in range(seeds)]
        if case in baselines.values():
            continue
        baseline = baselines[case.adam]
        ratios = paired(losses[case.name], losses[baseline.name])
        report(
            f"validation loss of {case.name}, {task.name}, {RANKS} ranks, {steps} steps",
            statistics.median(losses[case.name]),
            "nats",
            baseline=(baseline.name, statistics.median(losses[baseline.name])),
            ratio=statistics.median(ratios),
            at_most=case.at_most,
            target_of="ratio",
            samples=losses[case.name],
            ratios=[round(ratio, 4) for ratio in ratios],
        )


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
        seeds, steps = (1, 8) if options.quick else (3, task.steps)
        # For a check it is enough to run all of them once, on the smaller model.
        only = "bytegrad" if options.quick and make is tasks.text else options.only
        compare(task, seeds, steps, only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
