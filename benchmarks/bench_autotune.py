"""What autotune finds, and what it gains: the demo's GPT with 2 ranks, on one host and between two over a slow link.

GradientAllReduce may be sent exactly, by Int8 or by Int4: a fast link wants other codecs than a slow one. The tuned
wrapper is timed in turns against the one it began as, and against each codec by hand. The slow link is a pair of
network namespaces whose devices send at 100 Mbit/s (root and iproute2 needed; else that part says so).
"""

import json
import statistics
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    answer,
    arguments,
    interleaved,
    paired,
    report,
    rows_of,
    run_hosts,
    run_processes,
    slowest,
)
from torch import optim

import gossamer as gs
from gossamer.netlab import missing
from gossamer.workloads.gpt import CONTEXT, GPT

RATE = "100mbit"
MOST_STEPS = 200
NO_LOSS = 1.03  # of the step it began with, where nothing is to be gained
NEAR_BEST = 1.05  # of the best by hand
BY_HAND = {"exact": None, "Int8": gs.Int8(), "Int4": gs.Int4()}


class Training:
    """A fresh GPT with AdamW; a call is one step."""

    def __init__(self, codec: gs.Codec | None, rows: int, autotune: Any = False) -> None:
        torch.manual_seed(0)
        network = GPT()
        self.optimizer = optim.AdamW(network.parameters(), lr=1e-4, fused=True)
        algorithm = gs.GradientAllReduce(codec=codec)
        self.model = gs.DataParallel(network, self.optimizer, algorithm=algorithm, autotune=autotune)
        self.text = torch.randint(
            256, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(gs.rank())
        )

    def __call__(self) -> None:
        loss = self.model(self.text)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def measured(quick: bool) -> dict[str, Any]:
    """The result of tuning, and the seconds of each turn."""
    settings = gs.Autotune([], [gs.Int8()]) if quick else gs.Autotune(codecs=[gs.Int8(), gs.Int4()])
    rows = rows_of(quick)
    tuned = Training(None, rows, settings)
    while tuned.model.tuned is None:
        tuned()
    found = tuned.model.tuned
    codecs = Counter(found.codecs.get(bucket.names[0], "exact") for bucket in tuned.model.engine.buckets)
    bodies = {"tuned": tuned} | {name: Training(codec, rows) for name, codec in BY_HAND.items()}
    rounds, repeats = (2, 1) if quick else (12, 4)
    turns = slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))
    return {"steps": found.steps, "bucket_bytes": found.bucket_bytes, "codecs": dict(codecs), "turns": turns}


def show(where: str, found: dict[str, Any]) -> None:
    turns = found["turns"]
    report(f"steps that tuning took, {where}", found["steps"], "steps", at_most=MOST_STEPS)
    medians = {name: statistics.median(turns[name]) for name in BY_HAND}
    best = min(medians, key=lambda name: medians[name])
    for name in dict.fromkeys(["exact", best]):
        ratio = statistics.median(paired(turns["tuned"], turns[name]))
        report(
            f"tuned step over {'the one it began as' if name == 'exact' else 'the best by hand'}, {where}",
            1e3 * statistics.median(turns["tuned"]),
            "ms",
            baseline=(f"{name}, 25 MiB", 1e3 * medians[name]),
            ratio=ratio,
            at_most=NO_LOSS if name == "exact" else NEAR_BEST,
            target_of="ratio",
            samples=[1e3 * seconds for seconds in turns["tuned"]],
            bucket_bytes=found["bucket_bytes"],
            codecs=found["codecs"],
        )


def main() -> None:
    options = arguments(__doc__)
    if options.worker:
        gs.init(backend="gloo")
        answer(measured(json.loads(options.worker)["quick"]))
        return
    job = {"quick": options.quick}
    show("one host, Gloo", run_processes(2, job))
    if options.quick:
        return
    if why := missing():
        print(f"not measured over a slow link: {why}", file=sys.stderr)
    else:
        show(f"two hosts, {RATE}", run_hosts(2, job, rate=RATE))


if __name__ == "__main__":
    main()
