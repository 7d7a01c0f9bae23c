"""Stock DDP over a slow link: our hooks against torch's fp16 hook, and the effect of resuming on error feedback.

Two and four hosts are network namespaces whose devices send at 100 Mbit/s (root and iproute2 needed; else that part
says so). Every rank trains copies of the demo's GPT in turns, one thread each; a step counts on the slowest rank.
--quick has two ranks on one host, where no link is slow.
"""

import copy
import json
import statistics
import sys
from collections.abc import Callable
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs
from gossamer.netlab import missing
from gossamer.workloads.gpt import CONTEXT, GPT

RATE = "100mbit"
HOSTS = (2, 4)
ROWS_ON_HOSTS = 1  # all hosts share this machine's cores, and the link is to be measured, not the cores
TARGET = 0.55  # bytegrad's step over that of torch's fp16 hook
PLAIN, FP16 = "no hook", "torch's fp16 hook"
OURS = {name: getattr(gs.hooks, name) for name in ("bytegrad", "int8", "int4", "onebit", "bf16", "powersgd")}
QUICK = ("bytegrad",)
NATIVE = "bytegrad, native path"


class Training:
    """A fresh GPT with AdamW under stock DDP; a call is one step."""

    def __init__(
        self, hook: Callable[..., Any] | None, *, ours: bool = True, native: bool = False, rows: int
    ) -> None:
        torch.manual_seed(0)
        self.network = GPT()
        self.optimizer = optim.AdamW(self.network.parameters(), lr=1e-4, fused=True)
        self.model = DistributedDataParallel(self.network)
        self.state = gs.hooks.State(self.model) if ours else None
        if native:
            gs.hooks.register(self.model, self.state, hook)
        elif hook is not None:
            self.model.register_comm_hook(self.state, hook)
        self.text = torch.randint(
            256, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(dist.get_rank())
        )

    def __call__(self) -> None:
        loss = self.model(self.text)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def measured(quick: bool, rows: int) -> dict[str, list[float]]:
    """Seconds a step of each variant, a figure for each turn."""
    names = QUICK if quick else tuple(OURS)
    peers = {PLAIN: None, FP16: fp16_compress_hook}
    bodies = {name: Training(hook, ours=False, rows=rows) for name, hook in peers.items()}
    bodies |= {name: Training(OURS[name], rows=rows) for name in names}
    bodies[NATIVE] = Training(gs.hooks.bytegrad, native=True, rows=rows)
    rounds, repeats = (2, 1) if quick else (6, 2)
    return slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))


def changed_by_resuming(quick: bool) -> int:
    """Elements of weights and errors that differ between a run and one that was saved and resumed in its middle."""
    steps, rows = 4 if quick else 12, rows_of(quick)
    whole = Training(gs.hooks.onebit, rows=rows)
    first, second = (Training(gs.hooks.onebit, rows=rows) for _ in range(2))
    for _ in range(steps):
        whole()
    for _ in range(steps // 2):
        first()
    saved = (first.network.state_dict(), first.optimizer.state_dict(), first.state.state_dict())
    for part, state in zip(
        (second.network, second.optimizer, second.state), copy.deepcopy(saved), strict=True
    ):
        part.load_state_dict(state)
    for _ in range(steps - steps // 2):
        second()
    pairs = list(zip(whole.network.parameters(), second.network.parameters(), strict=True))
    errors = whole.state.state_dict()["errors"], second.state.state_dict()["errors"]
    pairs += [(errors[0][name], errors[1][name]) for name in errors[0]]
    return sum(int((one != other).sum()) for one, other in pairs)


def show(where: str, turns: dict[str, list[float]], *, slow_link: bool) -> None:
    for name, seconds in turns.items():
        if name == FP16:
            continue
        judged = slow_link and name in ("bytegrad", NATIVE)
        report(
            f"step of the demo's GPT under stock DDP, {where}, {name}",
            1e3 * statistics.median(seconds),
            "ms",
            baseline=(FP16, 1e3 * statistics.median(turns[FP16])),
            ratio=statistics.median(paired(seconds, turns[FP16])),
            at_most=TARGET if judged else None,
            target_of="ratio",
            samples=[1e3 * each for each in seconds],
        )


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    if options.worker:
        job = json.loads(options.worker)
        gs.init(backend="gloo")
        quick = job["quick"]
        steps = job["what"] == "steps"
        answer({"turns": measured(quick, job["rows"])} if steps else {"changed": changed_by_resuming(quick)})
        return
    job = {"what": "steps", "quick": options.quick, "rows": rows_of(options.quick)}
    show("2 processes, one host", run_processes(2, job)["turns"], slow_link=False)
    changed = run_processes(2, job | {"what": "resume"})["changed"]
    report(
        "elements of weights and errors that resuming changed, onebit hook", changed, "elements", at_most=0
    )
    if options.quick:
        return
    if why := missing():
        print(f"not measured over a slow link: {why}", file=sys.stderr)
    else:
        job["rows"] = ROWS_ON_HOSTS
        for size in HOSTS:
            where = f"{size} hosts, {RATE}, {ROWS_ON_HOSTS} row each"
            show(where, run_hosts(size, job, rate=RATE)["turns"], slow_link=True)


if __name__ == "__main__":
    main()
