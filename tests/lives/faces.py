"""The ways to wrap a model, for the table of lives: each returns a Wrapped. Not a test file."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gossamer as gs
import gossamer.horovod.torch as hvd
from gossamer.bagua.torch_api import algorithms as bagua
from gossamer.bagua.torch_api import with_bagua
from gossamer.bagua.torch_api.data_parallel import DistributedDataParallel as BaguaDDP

LR, MOMENTUM, WARMUP = 0.05, 0.9, 100


@dataclass
class Wrapped:
    """`forward` runs the model's forward, and `held` is what the face gave."""

    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    held: Any
    close: Callable[[], None]

    def train(
        self, inputs: Tensor, rest: Callable[[Tensor], Tensor] = lambda x: x
    ) -> list[tuple[Tensor, Tensor]]:
        """A step on each of the inputs. Returns the outputs and losses, with their graphs. `rest` of a larger model."""
        seen = []
        for batch in inputs:
            self.optimizer.zero_grad()
            output = rest(self.forward(batch))
            loss = output.square().mean()
            loss.backward(retain_graph=True)
            self.optimizer.step()
            seen.append((output, loss))
        return seen


def optimizer_of(face: str, kind: str, params: Any) -> torch.optim.Optimizer:
    if kind != "momenta":
        return torch.optim.SGD(params, LR, momentum=MOMENTUM)
    own = bagua.q_adam.QAdamOptimizer if "bagua" in face else gs.QAdamOptimizer
    return own(params, LR, WARMUP)


#: What is averaged, and by which algorithm: gradients, the weights after each step, those before it, and momenta. Each
#: makes the steps of one process that has all the data, but "peers", whose ranks differ.
ALGORITHMS: dict[str, Callable[[], gs.Algorithm]] = {
    "gradients": gs.GradientAllReduce,
    "weights": lambda: gs.LocalSGD(1),
    "peers": gs.Decentralized,
    "momenta": gs.QAdam,
}


def data_parallel(model: nn.Module, kind: str, group: Any = None, algorithm: Any = None) -> Wrapped:
    return _module(gs.DataParallel, "process_group", model, kind, group, algorithm)


def ddp(model: nn.Module, kind: str, group: Any = None, algorithm: Any = None) -> Wrapped:
    return _module(gs.DistributedDataParallel, "process_group", model, kind, group, algorithm)


def _module(face: Any, name: str, model: nn.Module, kind: str, group: Any, algorithm: Any) -> Wrapped:
    optimizer = optimizer_of("gossamer", kind, model.parameters())
    chosen = algorithm or ALGORITHMS[kind]()
    wrapped = face(model, optimizer=optimizer, algorithm=chosen, **{name: group})
    return Wrapped(wrapped, optimizer, wrapped, wrapped.close)


_BAGUA: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "gradients": lambda _: bagua.gradient_allreduce.GradientAllReduceAlgorithm(),
    "peers": lambda _: bagua.decentralized.DecentralizedAlgorithm(hierarchical=False),
    "momenta": bagua.q_adam.QAdamAlgorithm,
}


def with_bagua_(model: nn.Module, kind: str, group: Any = None, algorithm: Any = None) -> Wrapped:
    optimizer = optimizer_of("bagua", kind, model.parameters())
    with_bagua(model, [optimizer], algorithm or _BAGUA[kind](optimizer), process_group=group)
    return Wrapped(model, optimizer, model.bagua_ddp, model.bagua_ddp.close)


def bagua_ddp(model: nn.Module, kind: str, group: Any = None, algorithm: Any = None) -> Wrapped:
    optimizer = optimizer_of("bagua", kind, model.parameters())
    chosen = algorithm or _BAGUA[kind](optimizer)
    wrapped = BaguaDDP(model, optimizers=[optimizer], algorithm=chosen, process_group=group)
    return Wrapped(wrapped, optimizer, wrapped, wrapped.close)


def horovod(model: nn.Module, kind: str, group: Any = None, algorithm: Any = None) -> Wrapped:
    """`kind` is one of HOROVOD."""
    options: dict[str, Any] = {
        "gradients": {},
        "named": {"named_parameters": list(model.named_parameters())},
        "negotiated": {"sparse_as_dense": True},
        "fp16": {"compression": hvd.Compression.bf16},
    }[kind]
    if group is not None:
        options["process_set"] = group
    optimizer = hvd.DistributedOptimizer(optimizer_of("horovod", kind, model.parameters()), **options)
    return Wrapped(model, optimizer, optimizer, lambda: None)


FACES: dict[str, Callable[..., Wrapped]] = {
    "DataParallel": data_parallel,
    "DistributedDataParallel": ddp,
    "with_bagua": with_bagua_,
    "bagua.DistributedDataParallel": bagua_ddp,
    "hvd.DistributedOptimizer": horovod,
}
KINDS = {
    "DataParallel": list(ALGORITHMS),
    "DistributedDataParallel": list(ALGORITHMS),
    "with_bagua": list(_BAGUA),
    "bagua.DistributedDataParallel": list(_BAGUA),
    "hvd.DistributedOptimizer": ["gradients", "named", "negotiated"],
}
