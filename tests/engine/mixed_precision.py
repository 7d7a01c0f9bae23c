"""Training under autocast with a GradScaler, on either kind of device, for test_mixed_precision.py. Not a test file.

`scaled` is what one rank does; `alone` is the same arithmetic in one process. Ranks are threads on the CPU and
processes on a GPU.
"""

from typing import Any

import torch
from torch import nn

import gossamer as gs
from gossamer.algorithms import ALGORITHMS
from gossamer.comm import is_communicator
from tests.support.models import batches, flat_weights, seeded, shard

HALF = {"cpu": torch.bfloat16, "cuda": torch.float16}  # autocast's default
FIRST_SCALE, GROWTH_INTERVAL = 1024.0, 3
SETTINGS: dict[str, dict[str, Any]] = {  # that do something within a few steps of a small model
    "async": {"sync_interval_ms": 1, "warmup_steps": 2},
    "local_sgd": {"period": 3, "lockstep": True},
    "powersgd": {"rank": 2, "min_compression_rate": 1.0},
}


class Net(nn.Module):
    """Notes the dtype that its layers compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 23), nn.Tanh(), nn.Linear(23, 5))
        self.computed_in: set[torch.dtype] = set()

    def forward(self, x):
        y = self.layers(x)
        self.computed_in.add(y.dtype)
        return y.float()


def autocast(device):
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=HALF[kind])


def scaler_of(device, scale):
    return torch.amp.GradScaler(
        torch.device(device).type,
        init_scale=scale or 1.0,
        growth_interval=GROWTH_INTERVAL,
        enabled=scale is not None,
    )


def optimizer_of(algorithm, params, kind="torch.optim"):
    if algorithm in ("qadam", "onebit_adam"):
        return gs.QAdamOptimizer(params, lr=0.01, warmup_steps=3)
    if algorithm == "zero_one_adam":
        return gs.ZeroOneAdamOptimizer(params, lr=0.01, freeze_steps=4, variance_scaler=2)
    if algorithm == "sharded":
        own = gs.optim.SGD if kind == "gs.optim" else torch.optim.SGD
        settings = {"fused": True} if kind == "fused" else {}
        return gs.ShardedOptimizer(own, params, lr=0.1, momentum=0.9, **settings)
    if kind == "gs.optim":
        return gs.optim.SGD(params, lr=0.1, momentum=0.9)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=kind == "fused")


def spoil(param, wanted):
    """Sets one element of the gradient to Inf in each backward for which `wanted` holds True."""

    def hook(grad):
        if not wanted[0]:
            return grad
        grad = grad.clone()
        grad.view(-1)[3] = float("inf")
        return grad

    param.register_hook(hook)


def scaled(
    comm: Any,
    *,
    device: str = "cpu",
    algorithm: str = "gradient_allreduce",
    optimizers: str = "torch.optim",
    bad: tuple[int, int] | None = None,
    scale: float | None = FIRST_SCALE,
    compiler: str | None = None,
    steps: int = 8,
) -> dict[str, Any]:
    """One rank's scale after each step, whether the step changed its weights, and the weights at the end.

    Args:
        comm: a communicator, or an object with rank and size for the ranks of the default group.
        bad: (rank, step) at which one gradient of that rank, and of no other, holds an Inf.
        scale: None for no scaler.
    """
    torch.set_num_threads(1)
    inner = seeded(Net).to(device)
    optimizer = optimizer_of(algorithm, inner.parameters(), optimizers)
    chosen = ALGORITHMS[algorithm](**SETTINGS.get(algorithm, {}))
    wrapped = gs.DataParallel(
        torch.compile(inner, backend=compiler) if compiler else inner,
        optimizer,
        algorithm=chosen,
        process_group=comm if is_communicator(comm) else None,
        bucket_bytes=500,
        first_bucket_bytes=100,
    )
    spoiled = [False]
    spoil(inner.layers[2].weight, spoiled)
    scaler, scales, moved = scaler_of(device, scale), [], []
    for step, batch in enumerate(batches(steps)):
        part, before = shard(batch, comm).to(device), flat_weights(inner)
        spoiled[0] = bad == (comm.rank, step)
        optimizer.zero_grad()
        with autocast(device):
            loss = wrapped(part).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(inner.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, flat_weights(inner)))
    wrapped.consensus()  # changes nothing where ranks hold equal weights
    wrapped.close()
    return {"scales": scales, "moved": moved, "weights": flat_weights(inner).cpu(), "in": inner.computed_in}


def alone(ranks, *, device="cpu", steps=8):
    """The weights after `steps` steps of one process that takes the mean of the ranks' gradients itself."""
    torch.set_num_threads(1)
    inner = seeded(Net).to(device)
    optimizer, scaler = optimizer_of("", inner.parameters()), scaler_of(device, FIRST_SCALE)
    for batch in batches(steps):
        optimizer.zero_grad()
        for part in batch.chunk(ranks):
            with autocast(device):
                loss = inner(part.to(device)).square().mean()
            scaler.scale(loss).backward()
        for param in inner.parameters():
            param.grad.div_(ranks)
        scaler.step(optimizer)
        scaler.update()
    return flat_weights(inner).cpu()
