"""A training step with PowerSGD: ours against torch DDP's own hook, and both against sending everything.

An MLP of 6 matrices of 1280 x 1280, float32, real processes over Gloo with one thread each, in turns in the same run; a
step is forward, backward with its communication, and SGD, and counts on the slowest rank. Rank 4, error feedback and
warm start on both sides, and one bucket: with several, torch's hook aborts over Gloo, because the callbacks of two
buckets issue their collectives in an order that differs between ranks. Ours with several is shown too.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import arguments, interleaved, paired, report_against, run_processes, serve, slowest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs

WIDTH, LAYERS, ROWS, RANK = 1280, 6, 32, 4
ALL_MIB, SOME_MIB = 64, 8  # bucket sizes: the whole model, and one or two matrices
OURS, THEIRS = "PowerSGD(4)", "DDP with powerSGD_hook(4)"
OVERLAPPED = "PowerSGD(4) in several buckets"
EXACT, PLAIN = "DataParallel(gradient_allreduce)", "stock DDP"
VARIANTS = (OURS, THEIRS, OVERLAPPED, EXACT, PLAIN)
PAIRS = (
    (OURS, THEIRS),
    (OVERLAPPED, THEIRS),
    (OURS, PLAIN),
    (OVERLAPPED, PLAIN),
    (THEIRS, PLAIN),
    (EXACT, PLAIN),
)


class Training:
    """A fresh MLP with SGD, wrapped as `variant` says; a call is one step."""

    def __init__(self, variant: str, width: int) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.network = nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3, fused=True)
        self.model = self._wrapped(variant)
        seeded = torch.Generator().manual_seed(dist.get_rank())
        self.rows = torch.randn(ROWS, width, generator=seeded)

    def _wrapped(self, variant: str) -> nn.Module:
        if variant in (OURS, OVERLAPPED, EXACT):
            size = (ALL_MIB if variant == OURS else SOME_MIB) << 20
            algorithm = gs.GradientAllReduce() if variant == EXACT else gs.PowerSGD(RANK)
            buckets = {"bucket_bytes": size, "first_bucket_bytes": size}
            return gs.DataParallel(self.network, self.optimizer, algorithm=algorithm, **buckets)
        model = DistributedDataParallel(
            self.network, bucket_cap_mb=ALL_MIB if variant == THEIRS else SOME_MIB
        )
        if variant == THEIRS:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=2
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model

    def __call__(self) -> None:
        loss = self.model(self.rows).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def worker(*, quick: bool) -> dict[str, list[float]]:
    """Milliseconds a step of each variant on the slowest rank, a figure for each turn."""
    width = 256 if quick else WIDTH
    bodies: dict[str, Callable[[], None]] = {name: Training(name, width) for name in VARIANTS}
    rounds, repeats = (2, 1) if quick else (12, 4)
    turns = slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))
    return {name: [1e3 * s for s in each] for name, each in turns.items()}


def show(times: dict[str, list[float]], size: int) -> None:
    for name, peer in PAIRS:
        ratios = paired(times[peer], times[name])
        report_against(
            f"step of an MLP, {size} processes on Gloo, {name} against {peer}; ratio: how many times faster",
            times[name],
            "ms",
            (peer, times[peer]),
            ratios,
            at_least=1.0 if (name, peer) == (OURS, THEIRS) else None,
            quartiles=True,
        )


def main() -> None:
    options = arguments(__doc__)
    if serve(options, worker):
        return
    for size in (2,) if options.quick else (2, 4):
        show(run_processes(size, {"quick": options.quick}), size)


if __name__ == "__main__":
    main()
