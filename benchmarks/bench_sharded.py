"""ZeRO-1: what a rank keeps of AdamW's state, what it sends, and the loss, against AdamW on every rank.

A byte-level GPT, 4 ranks as threads over Gloo, equal steps, 3 seeds. The peer is gs.DataParallel with the exact mean
of gradients, which sends what DDP sends. A ratio compares runs of one seed. Its spread is that of the peer's seeds.
"""

import statistics
import sys
from functools import partial
from typing import Any

import tasks
import torch
from harness import arguments, paired, report
from torch import nn
from trainings import RANKS, Case, train, with_peak

import gossamer as gs


def with_adamw(task: tasks.Task, model: nn.Module, _steps: int) -> list[Any]:
    return [with_peak(torch.optim.AdamW(model.parameters()), task.adam_lr)]


def with_shards(task: tasks.Task, model: nn.Module, _steps: int) -> list[Any]:
    return [with_peak(gs.ShardedOptimizer(torch.optim.AdamW, model.parameters()), task.adam_lr)]


PEER = Case("AdamW on every rank", gs.GradientAllReduce, optimizers=with_adamw)
CASES = (
    Case("exact", gs.Sharded, optimizers=with_shards),
    Case("Int8 both ways", partial(gs.Sharded, gs.Int8(), gs.Int8()), optimizers=with_shards),
    Case("Int4 for weights", partial(gs.Sharded, gs.Int8(), gs.Int4()), optimizers=with_shards),
)


def main() -> int:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    task = tasks.text()
    seeds, steps = (1, 6) if options.quick else (3, task.steps)
    peer = [train(task, PEER, seed, steps) for seed in range(seeds)]
    losses = [each.loss for each in peer]
    spread = max(losses) / min(losses)
    for case in CASES:
        name, found = case.name, [train(task, case, seed, steps) for seed in range(seeds)]
        for what, place, unit, target in (
            (
                "largest optimizer state of a rank",
                "state_bytes",
                "bytes",
                {"at_most": 1.01 / RANKS} if name == "exact" else {},
            ),
            (
                "bytes sent a step",
                "sent_bytes",
                "bytes",
                {"at_most": 0.27} if name == "Int8 both ways" else {},
            ),
            ("validation loss", "loss", "nats", {"at_most": round(spread, 4)}),
        ):
            ratios = paired([getattr(each, place) for each in found], [getattr(each, place) for each in peer])
            report(
                f"{what}, ZeRO-1, {name}, {RANKS} ranks, {steps} steps",
                statistics.median(getattr(each, place) for each in found),
                unit,
                baseline=(PEER.name, statistics.median(getattr(each, place) for each in peer)),
                ratio=statistics.median(ratios),
                target_of="ratio",
                ratios=[round(ratio, 4) for ratio in ratios],
                **target,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
