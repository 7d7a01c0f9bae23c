# What is compared: the methods of Gossamer's algorithms that have a Trial, and what stock torch has. A variant makes a
# training of a model; it neither times nor judges. steps.py and loss.py call it, and command.py offers the names.
"""The table of variants: ours, and torch's own."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from gossamer.algorithms import ALGORITHMS
from gossamer.facts import Settings, Trial

PERIOD = 16  # steps between two synchronisations of local SGD, ours and torch's


@dataclass(frozen=True)
class Setting:
    """The setting of one run.

    Args:
        group: the group of our algorithms; torch's variants use the default group, on Gloo.
        warmup_steps: exact steps at the beginning of QAdam and the other frozen-variance optimizers.
    """

    group: Any
    ranks_per_host: int
    lr: float
    warmup_steps: int = 1


@dataclass(frozen=True)
class Variant:
    """A way to train in parallel.

    Args:
        ours: makes the algorithm. None: stock DDP trains.
        hook: registers a hook with stock DDP, and returns the optimizer to use.
        wrap: a program of torch's own that takes the place of stock DDP. Its optimizer is made afterwards.
        trial: what steps and weights are like.
        flat: whether sums have one level even if ranks share hosts.
        algorithm: the class whose optimizer the training has.
    """

    ours: Callable[[], gs.Algorithm] | None = None
    hook: Callable[[DistributedDataParallel, optim.Optimizer, Setting], optim.Optimizer] | None = None
    wrap: Callable[[nn.Module, Setting], nn.Module] | None = None
    trial: Trial = field(default=Trial())
    flat: bool = False
    algorithm: type[gs.Algorithm] = gs.GradientAllReduce
    bucket_cap_mb: int | None = None

    @property
    def period(self) -> int:
        """Steps after which the pattern of sent bytes repeats; any number if it sends by the clock."""
        return PERIOD if self.trial.periodic else 1

    @property
    def optimizer(self) -> str:
        """The name of the optimizer's class."""
        return (self.algorithm.optimizer_class or optim.AdamW).__name__


def _fp16(model: DistributedDataParallel, optimizer: optim.Optimizer, _: Setting) -> optim.Optimizer:
    model.register_comm_hook(None, fp16_compress_hook)
    return optimizer


def _powersgd(model: DistributedDataParallel, optimizer: optim.Optimizer, _: Setting) -> optim.Optimizer:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return optimizer


def _local(model: DistributedDataParallel, optimizer: optim.Optimizer, setting: Setting) -> optim.Optimizer:
    # The import takes seconds: it compiles what nobody here uses.
    from torch.distributed.optim import PostLocalSGDOptimizer

    subgroup, _ = dist.new_subgroups(setting.ranks_per_host)
    state = PostLocalSGDState(None, subgroup, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=PERIOD, warmup_steps=0))


def _ddp_with_codec(network: nn.Module, _: Setting) -> nn.Module:
    group = dist.new_group(backend="gossamer", pg_options=gs.Options(gs.Int8(), min_bytes=0))
    return DistributedDataParallel(network, process_group=group)


def hybrid_sharded(network: nn.Module, ranks_per_host: int, options: gs.Options | None) -> nn.Module:
    """Shards a network inside each host, in place, with replicas on all hosts, and returns it.

    Args:
        options: of the groups between hosts; all groups are then of the backend gossamer. None: of the default group's.
    """
    from torch.distributed.device_mesh import init_device_mesh

    chosen: Any = options and {"hosts": ("gossamer", options), "shards": ("gossamer", None)}
    mesh = init_device_mesh(
        "cpu",
        (dist.get_world_size() // ranks_per_host, ranks_per_host),
        mesh_dim_names=("hosts", "shards"),
        backend_override=chosen,
    )
    return sharded(network, mesh)


def sharded(network: nn.Module, mesh: Any) -> nn.Module:
    """Shards each block of a network and then the rest over a mesh, in place, and returns it."""
    # The import takes a second.
    from torch.distributed.fsdp import fully_shard

    for block in getattr(network, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


def _fsdp2(network: nn.Module, _: Setting, weights: gs.Delta | None = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    sharded(network, init_device_mesh("cpu", (dist.get_world_size(),)))
    if weights is not None:
        gs.fsdp.compress(network, gs.Int8(), weights=weights)
    return network


def _hsdp(network: nn.Module, setting: Setting, options: gs.Options | None = None) -> nn.Module:
    return hybrid_sharded(network, setting.ranks_per_host, options)


PEERS = {
    "ddp": Variant(),
    "ddp_fp16_hook": Variant(hook=_fp16),
    # One bucket: with several this hook aborts over Gloo.
    "ddp_powersgd_hook": Variant(hook=_powersgd, bucket_cap_mb=1024),
    "ddp_post_local_sgd": Variant(hook=_local, trial=Trial(periodic=True)),
}


OURS = {
    method.name: Variant(
        ours=partial(method.trial.make or method.make, Settings(period=PERIOD)),
        trial=method.trial,
        algorithm=algorithm,
    )
    for algorithm in ALGORITHMS.values()
    for method in algorithm.methods
    if method.trial is not None
}
# Variants in one level, for hosts with several ranks. All other variants go by hosts there.
FLAT = {
    "flat": replace(OURS["gradient_allreduce"], flat=True),
    "flat_bytegrad": replace(OURS["bytegrad"], flat=True),
    "flat_int4": replace(OURS["int4"], flat=True),
}
# torch's own programs, as they are and with codecs. Hybrid sharding needs several ranks on a host.
PROGRAMS = {
    "ddp_int8_group": Variant(wrap=_ddp_with_codec),
    "fsdp2": Variant(wrap=_fsdp2),
    "fsdp2_delta": Variant(wrap=partial(_fsdp2, weights=gs.Delta(gs.Int4()))),
}
SHARDED = {
    "hsdp": Variant(wrap=_hsdp),
    "hsdp_int8_group": Variant(wrap=partial(_hsdp, options=gs.Options(gs.Int8()))),
}
VARIANTS = PEERS | OURS | FLAT | PROGRAMS | SHARDED
ALGORITHM_OF_OPTIMIZER = {variant.optimizer: variant.algorithm for variant in VARIANTS.values()}


class Training:
    """A model, its optimizer, and how they are joined to the other ranks; step(*batch) is one training step.

    Args:
        variant: None trains without other ranks.
        alone: the optimizer's class by its name, if `variant` is None.
    """

    def __init__(
        self, network: nn.Module, variant: Variant | None, setting: Setting, *, alone: str = "AdamW"
    ) -> None:
        self.network: nn.Module = network
        self.model: nn.Module = network
        if variant is not None and variant.wrap is not None:
            self.model = variant.wrap(network, setting)
        self.variant: Variant | None = variant
        algorithm = ALGORITHM_OF_OPTIMIZER[alone] if variant is None else variant.algorithm
        self.optimizer: optim.Optimizer = algorithm.make_optimizer(
            network.parameters(), lr=setting.lr, warmup_steps=setting.warmup_steps
        )
        self.ours: gs.DataParallel | None = None
        if variant is None or variant.wrap is not None:
            return
        if variant.ours is not None:
            group: Any = gs.Flat(setting.group) if variant.flat else setting.group
            self.model = self.ours = gs.DataParallel(
                network, self.optimizer, algorithm=variant.ours(), process_group=group
            )
            return
        self.model = stock = DistributedDataParallel(network, bucket_cap_mb=variant.bucket_cap_mb)
        if variant.hook is not None:
            self.optimizer = variant.hook(stock, self.optimizer, setting)

    def step(self, *batch: torch.Tensor) -> None:
        loss = self.model(*batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that this rank has sent, as Gossamer counts them; None for torch's variants."""
        return None if self.ours is None else self.ours.engine.bytes_sent

    def close(self) -> None:
        if self.ours is not None:
            self.ours.close()
