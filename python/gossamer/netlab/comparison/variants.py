# What is compared: each algorithm of Gossamer's table with the codecs that matter on a slow link, and what stock torch
# has. A variant makes a training of a model; it neither times nor judges. steps.py and loss.py call it, and
# command.py offers the names.
"""The table of variants: ours, and torch's own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs

PERIOD = 16  # steps between two synchronisations of local SGD, ours and torch's
OUTER = partial(optim.SGD, lr=0.7, momentum=0.5, nesterov=True)
INT4, ONEBIT = gs.ErrorFeedback(gs.Int4()), gs.ErrorFeedback(gs.OneBit())


@dataclass(frozen=True)
class Setting:
    """Of one run. `group` is that of our algorithms; torch's use the default group, which is Gloo's.

    warmup_steps: exact steps that QAdam and its kin begin with.
    """

    group: Any
    ranks_per_host: int
    lr: float
    warmup_steps: int = 1


@dataclass(frozen=True)
class Variant:
    """A way to train in parallel.

    Args:
        ours: makes the algorithm; None where `hook` says what stock DDP does.
        hook: registers a hook with stock DDP, and may give an optimizer in the place of the one it gets.
        period: steps after which the same bytes have gone again; by the clock: some.
        apart: ranks hold different weights when a step ends that is a multiple of the period.
        offset: steps after a multiple of the period at which nothing is under way.
        flat: in one level, also where ranks share hosts.
        by_clock: it sends by the clock, not by steps, and never rests.
    """

    what: str
    ours: Callable[[], gs.Algorithm] | None = None
    hook: Callable[[DistributedDataParallel, optim.Optimizer, Setting], optim.Optimizer] | None = None
    period: int = 1
    apart: bool = False
    offset: int = 0
    flat: bool = False
    by_clock: bool = False
    optimizer: str = "adamw"
    bucket_cap_mb: int | None = None


def _no_hook(model: DistributedDataParallel, optimizer: optim.Optimizer, _: Setting) -> optim.Optimizer:
    return optimizer


def _fp16(model: DistributedDataParallel, optimizer: optim.Optimizer, _: Setting) -> optim.Optimizer:
    model.register_comm_hook(None, fp16_compress_hook)
    return optimizer


def _powersgd(model: DistributedDataParallel, optimizer: optim.Optimizer, _: Setting) -> optim.Optimizer:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return optimizer


def _local(model: DistributedDataParallel, optimizer: optim.Optimizer, setting: Setting) -> optim.Optimizer:
    from torch.distributed.optim import (
        PostLocalSGDOptimizer,
    )  # takes seconds: it compiles what nobody here uses

    subgroup, _ = dist.new_subgroups(setting.ranks_per_host)
    state = PostLocalSGDState(None, subgroup, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=PERIOD, warmup_steps=0))


def _streaming() -> gs.Algorithm:
    return gs.LocalSGD(PERIOD, OUTER, codec=INT4, fragments=2, delay=4, merge=0.5)


PEERS = {
    "ddp": Variant("stock DDP on Gloo, no hook", hook=_no_hook),
    "ddp_fp16_hook": Variant("torch's fp16_compress_hook", hook=_fp16),
    # One bucket: with several this hook aborts over Gloo.
    "ddp_powersgd_hook": Variant("torch's PowerSGD hook, rank 4", hook=_powersgd, bucket_cap_mb=1024),
    "ddp_post_local_sgd": Variant(f"torch's post-local SGD, period {PERIOD}", hook=_local, period=PERIOD),
}
OURS = {
    "gradient_allreduce": Variant("exact mean", gs.GradientAllReduce),
    "deterministic": Variant("exact two-shot", lambda: gs.GradientAllReduce(deterministic=True)),
    "fp16": Variant("two-shot in fp16, Horovod's idea", lambda: gs.GradientAllReduce(codec=gs.FP16())),
    "bytegrad": Variant("ByteGrad, Int8", gs.ByteGrad),
    "int4": Variant("Int4, error feedback", lambda: gs.GradientAllReduce(codec=INT4)),
    "onebit": Variant("OneBit, error feedback", lambda: gs.GradientAllReduce(codec=ONEBIT)),
    "powersgd": Variant("PowerSGD, rank 4", lambda: gs.PowerSGD(4)),
    "qadam": Variant("QAdam, Int8", gs.QAdam, optimizer="qadam"),
    "onebit_adam": Variant("1-bit Adam", gs.OneBitAdam, optimizer="qadam"),
    "zero_one_adam": Variant("0/1 Adam", gs.ZeroOneAdam, optimizer="zero_one"),
    "decentralized": Variant("decentralized, all", gs.Decentralized, apart=True),
    "decentralized_one_peer_exponential": Variant(
        "decentralized, one peer", lambda: gs.Decentralized("one_peer_exponential"), apart=True
    ),
    "low_precision_decentralized": Variant("ring, Int8", gs.LowPrecisionDecentralized, apart=True),
    "local_sgd": Variant(f"local SGD, period {PERIOD}", lambda: gs.LocalSGD(PERIOD), period=PERIOD),
    "diloco": Variant(
        f"DiLoCo, period {PERIOD}, Int4", lambda: gs.LocalSGD(PERIOD, OUTER, codec=INT4), period=PERIOD
    ),
    "streaming_diloco": Variant(
        f"DiLoCo, period {PERIOD}, Int4, 2 fragments", _streaming, apart=True, offset=6, period=PERIOD
    ),
    "async": Variant(
        "asynchronous averaging", gs.AsyncModelAverage, apart=True, by_clock=True, period=PERIOD
    ),
}
FLAT = {  # of several ranks a host; the others then go by hosts
    "flat": Variant("exact mean, one level", gs.GradientAllReduce, flat=True),
    "flat_bytegrad": Variant("ByteGrad, one level", gs.ByteGrad, flat=True),
    "flat_int4": Variant("Int4, one level", lambda: gs.GradientAllReduce(codec=INT4), flat=True),
}
VARIANTS = PEERS | OURS | FLAT


def optimizer_for(kind: str, params: Any, setting: Setting) -> optim.Optimizer:
    """A fresh one: "adamw", "qadam" or "zero_one"."""
    if kind == "qadam":
        return gs.QAdamOptimizer(params, lr=setting.lr, warmup_steps=setting.warmup_steps)
    if kind == "zero_one":
        return gs.ZeroOneAdamOptimizer(params, lr=setting.lr, freeze_steps=setting.warmup_steps)
    return optim.AdamW(params, lr=setting.lr, fused=True)


class Training:
    """A model, its optimizer, and how they are joined to the other ranks; step(*batch) is one training step.

    Args:
        variant: None trains alone, with the optimizer that `alone` names.
    """

    def __init__(
        self, network: nn.Module, variant: Variant | None, setting: Setting, *, alone: str = "adamw"
    ) -> None:
        self.network, self.variant = network, variant
        kind = alone if variant is None else variant.optimizer
        self.optimizer = optimizer_for(kind, network.parameters(), setting)
        self.model: nn.Module = network
        self.ours: gs.DataParallel | None = None
        if variant is not None and variant.hook is not None:
            stock = DistributedDataParallel(network, bucket_cap_mb=variant.bucket_cap_mb)
            self.optimizer = variant.hook(stock, self.optimizer, setting)
            self.model = stock
        elif variant is not None and variant.ours is not None:
            group: Any = gs.Flat(setting.group) if variant.flat else setting.group
            algorithm = variant.ours()
            self.ours = gs.DataParallel(network, self.optimizer, algorithm=algorithm, process_group=group)
            self.model = self.ours

    def step(self, *batch: torch.Tensor) -> None:
        loss = self.model(*batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @property
    def bytes_sent(self) -> int | None:
        """By this rank, as Gossamer counts them; None where torch's own does the sending."""
        return None if self.ours is None else self.ours.engine.bytes_sent

    def close(self) -> None:
        if self.ours is not None:
            self.ours.close()
