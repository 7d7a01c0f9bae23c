"""ZeRO-1: what a rank keeps of AdamW's state, what it sends, and the loss, against AdamW on every rank.

A byte-level GPT, 4 ranks as threads over Gloo, equal steps, 3 seeds. The peer is gs.DataParallel with the exact mean
of gradients, which sends what DDP sends. A ratio compares runs of one seed. Its spread is that of the peer's seeds.
"""

import copy
import statistics
import sys
from functools import partial
from typing import Any

import tasks
import torch
from harness import arguments, paired, report, run_threads

import gossamer as gs

RANKS = 4
CASES = {
    "exact": gs.Sharded,
    "Int8 both ways": partial(gs.Sharded, gs.Int8(), gs.Int8()),
    "Int4 for weights": partial(gs.Sharded, gs.Int8(), gs.Int4()),
}


def train(task: tasks.Task, name: str, seed: int, steps: int) -> tuple[float, float, float]:
    """The validation loss of rank 0, and for the mean of the ranks the bytes of state and the bytes sent a step."""
    torch.manual_seed(seed)
    start = task.model()

    def body(comm: Any, _backend: Any) -> tuple[float, float, float]:
        model = copy.deepcopy(start)
        params = list(model.parameters())
        optimizer: Any = torch.optim.AdamW(params, lr=task.adam_lr)
        algorithm: gs.Algorithm = gs.GradientAllReduce()
        if name in CASES:
            optimizer = gs.ShardedOptimizer(torch.optim.AdamW, params, lr=task.adam_lr)
            algorithm = CASES[name]()
        sizes = {"bucket_bytes": task.bucket_bytes, "first_bucket_bytes": task.bucket_bytes}
        wrapped = gs.DataParallel(model, optimizer, algorithm=algorithm, process_group=comm, **sizes)
        sent = 0
        for step in range(steps):
            if step == 2:  # the plan of the buckets has settled
                sent = wrapped.engine.bytes_sent
            for group in optimizer.param_groups:
                group["lr"] = tasks.learning_rate(task.adam_lr, step, steps)
            batch = [part.chunk(RANKS)[comm.rank] for part in task.batch((seed << 32) + step)]
            optimizer.zero_grad()
            wrapped(*batch).backward()
            optimizer.step()
        sent = (wrapped.engine.bytes_sent - sent) / (steps - 2)
        state = [each for of_one in optimizer.state.values() for each in of_one.values()]
        kept = sum(each.nbytes for each in state if isinstance(each, torch.Tensor) and each.dim() > 0)
        wrapped.close()
        with torch.no_grad():
            return (model(*task.validation).item() if comm.rank == 0 else 0.0), kept, sent

    results = run_threads(RANKS, body)
    return results[0][0], max(kept for _, kept, _ in results), statistics.mean(sent for *_, sent in results)


def main() -> int:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    task = tasks.text()
    seeds, steps = (1, 6) if options.quick else (3, task.steps)
    peer = [train(task, "peer", seed, steps) for seed in range(seeds)]
    losses = [loss for loss, _, _ in peer]
    spread = max(losses) / min(losses)
    for name in CASES:
        found = [train(task, name, seed, steps) for seed in range(seeds)]
        for what, place, unit, target in (
            (
                "largest optimizer state of a rank",
                1,
                "bytes",
                {"at_most": 1.01 / RANKS} if name == "exact" else {},
            ),
            ("bytes sent a step", 2, "bytes", {"at_most": 0.27} if name == "Int8 both ways" else {}),
            ("validation loss", 0, "nats", {"at_most": round(spread, 4)}),
        ):
            ratios = paired([each[place] for each in found], [each[place] for each in peer])
            report(
                f"{what}, ZeRO-1, {name}, {RANKS} ranks, {steps} steps",
                statistics.median(each[place] for each in found),
                unit,
                baseline=("AdamW on every rank", statistics.median(each[place] for each in peer)),
                ratio=statistics.median(ratios),
                target_of="ratio",
                ratios=[round(ratio, 4) for ratio in ratios],
                **target,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
