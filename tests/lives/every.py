"""Every algorithm by every face that takes it, for tables that train by each. Not a test file."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import gossamer as gs
from gossamer.bagua.torch_api import algorithms as bagua
from gossamer.bagua.torch_api import with_bagua
from gossamer.bagua.torch_api.data_parallel import DistributedDataParallel as BaguaDDP

LR, MOMENTUM = 0.02, 0.9
HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
OURS: dict[str, Callable[[], gs.Algorithm]] = {
    "gradient_allreduce": gs.GradientAllReduce,
    "bytegrad": gs.ByteGrad,
    "int4": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4())),
    "powersgd": lambda: gs.PowerSGD(start_step=1),
    "qadam": gs.QAdam,
    "onebit_adam": gs.OneBitAdam,
    "zero_one_adam": gs.ZeroOneAdam,
    "decentralized": gs.Decentralized,
    "shift_one": lambda: gs.Decentralized("shift_one"),
    "low_precision_decentralized": gs.LowPrecisionDecentralized,
    "local_sgd": lambda: gs.LocalSGD(2),
    "local_sgd in lockstep": lambda: gs.LocalSGD(2, lockstep=True),
    "local_sgd with delay": lambda: gs.LocalSGD(2, delay=1),
    "diloco": lambda: gs.LocalSGD(2, lambda params: torch.optim.SGD(params, 0.7)),
    "async": lambda: gs.AsyncModelAverage(sync_interval_ms=0),
    "sharded": gs.Sharded,
}
BAGUA: dict[str, Callable[[Any], Any]] = {
    "gradient_allreduce": lambda _: bagua.gradient_allreduce.GradientAllReduceAlgorithm(),
    "bytegrad": lambda _: bagua.bytegrad.ByteGradAlgorithm(),
    "qadam": bagua.q_adam.QAdamAlgorithm,
    "decentralized": lambda _: bagua.decentralized.DecentralizedAlgorithm(),
    "low_precision_decentralized": lambda _: bagua.decentralized.LowPrecisionDecentralizedAlgorithm(),
    "async": lambda _: bagua.async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=0),
}
_ADAM = {
    "qadam": gs.QAdamOptimizer,
    "onebit_adam": gs.QAdamOptimizer,
    "zero_one_adam": gs.ZeroOneAdamOptimizer,
}
#: Algorithms whose optimizer has their state, so that no other one may step.
OWN_OPTIMIZER = (*_ADAM, "sharded")


def optimizer_of(face: str, name: str, params: Any) -> torch.optim.Optimizer:
    """An optimizer with which the algorithm works, and whose first steps are not like later ones."""
    if name == "qadam" and "bagua" in face:
        return bagua.q_adam.QAdamOptimizer(params, LR, 2)
    if name in _ADAM:
        return _ADAM[name](params, LR, 2)
    if name == "sharded":
        return gs.ShardedOptimizer(torch.optim.SGD, params, lr=LR, momentum=MOMENTUM)
    return torch.optim.SGD(params, LR, momentum=MOMENTUM)


@dataclass
class Wrapped:
    """`forward` is the module that a script of this face calls. `own` is what has the engine."""

    forward: nn.Module
    own: Any


def _by_class(face: Any) -> Callable[..., Wrapped]:
    def wrap(name: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Wrapped:
        wrapped = face(model, optimizer=list(optimizers), algorithm=OURS[name]())
        return Wrapped(wrapped, wrapped)

    return wrap


def _with_bagua(name: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Wrapped:
    with_bagua(model, list(optimizers), BAGUA[name](optimizers[0]))
    return Wrapped(model, model.bagua_ddp)


def _bagua_ddp(name: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Wrapped:
    wrapped = BaguaDDP(model, optimizers=list(optimizers), algorithm=BAGUA[name](optimizers[0]))
    return Wrapped(wrapped, model.bagua_ddp)


def fabric_of(algorithm: Any) -> Any:
    """A Fabric of all ranks, which is launched."""
    import lightning.fabric as lf

    from gossamer.lightning import fabric as ours

    fabric = lf.Fabric(strategy=ours.GossamerStrategy(algorithm), accelerator="cpu", devices=gs.size())
    fabric.launch()
    return fabric


def trainer(strategy: Any, **options: Any) -> Any:
    """A Lightning Trainer of all ranks for one epoch, which prints and writes nothing."""
    import lightning.pytorch as pl

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys((*off, "use_distributed_sampler"), False)
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=gs.size(), max_epochs=1, **quiet, **options
    )


def _by_fabric(name: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Wrapped:
    wrapped, *_ = fabric_of(OURS[name]()).setup(model, *optimizers)
    return Wrapped(wrapped, wrapped._forward_module)


FACES: dict[str, Callable[[str, nn.Module, Sequence[torch.optim.Optimizer]], Wrapped]] = {
    "DataParallel": _by_class(gs.DataParallel),
    "DistributedDataParallel": _by_class(gs.DistributedDataParallel),
    "with_bagua": _with_bagua,
    "bagua.DistributedDataParallel": _bagua_ddp,
}
if HAS_LIGHTNING:
    FACES["fabric"] = _by_fabric
NAMES: dict[str, list[str]] = {face: list(BAGUA if "bagua" in face else OURS) for face in FACES}
if HAS_LIGHTNING:
    NAMES["fabric"].remove("sharded")  # which Lightning's strategies refuse
CELLS = [(face, name) for face in FACES for name in NAMES[face]]
