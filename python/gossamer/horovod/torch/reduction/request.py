"""``Request``: what a DistributedOptimizer asks its reduction for. ``agree()`` compares the requests of the ranks."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.horovod.common.process_sets import ProcessSet
from gossamer.horovod.common.util import split_list
from gossamer.horovod.torch.compression import describe
from gossamer.horovod.torch.functions import allgather_object
from gossamer.horovod.torch.operations.collectives import allreduce
from gossamer.horovod.torch.operations.submission import Max, Sum


@dataclass(frozen=True)
class Request:
    """The parameters whose gradients are reduced, and how.

    Args:
        names, params: all parameters of the optimizer, in its order.
        trained: indices of those that need gradients when the request is made; others may later.
        groups: indices of parameters that are reduced together; the others are reduced alone.
    """

    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    trained: frozenset[int]
    compression: Any
    op: int
    predivide: float
    groups: tuple[tuple[int, ...], ...]
    sparse_as_dense: bool
    process_set: ProcessSet

    def is_trained(self, index: int) -> bool:
        """Returns whether a parameter needs a gradient, or did when the request was made."""
        return index in self.trained or self.params[index].requires_grad

    def lines(self) -> list[str]:
        """Returns a line for each thing that must be equal on all ranks."""
        settings = (
            f"op {self.op}, gradient_predivide_factor {self.predivide}, compression {describe(self.compression)}, "
            f"sparse_as_dense {self.sparse_as_dense}, groups {self.groups}, ranks {self.process_set.ranks}"
        )
        return [settings] + [
            f"parameter {name} {list(param.shape)} {param.dtype} on {param.device.type}"
            f"{'' if index in self.trained else ', frozen'}"
            for index, (name, param) in enumerate(zip(self.names, self.params, strict=True))
        ]


def request_of(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], groups: Any, **settings: Any
) -> Request:
    """Returns the request for the optimizer's current parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    trained = [index for index, param in enumerate(params) if param.requires_grad]
    return Request(
        names=tuple(names[param] for param in params),
        params=tuple(params),
        trained=frozenset(trained),
        groups=_groups(groups, params, trained),
        **settings,
    )


def _groups(groups: Any, params: Sequence[Tensor], trained: list[int]) -> tuple[tuple[int, ...], ...]:
    if groups is None or groups == 0:
        return ()
    if isinstance(groups, int):
        members = split_list(trained, groups)
    else:
        place = {id(params[index]): index for index in trained}
        members = [[place[id(param)] for param in each if id(param) in place] for each in groups]
    return tuple(tuple(group) for group in members if group)


def agree(request: Request, number: int, refusal: str) -> tuple[bool, dict[int, int]]:
    """Compares the requests of the ranks that are in their step, by named operations. Collective.

    Args:
        number: the optimizer's number, the same on all ranks.
        refusal: why the engine cannot reduce this rank's gradients, or an empty string.

    Returns:
        Whether every rank is in its step, rather than in join(); and the number of sparse dimensions of each gradient
        that is sparse on some rank, by index.

    Raises:
        ConfigError: on every rank, if the requests differ.
    """
    native, name = request.process_set.native(), f"gossamer.DistributedOptimizer.{number}"
    device = request.params[0].device if request.params else None

    def reduced(own: Tensor, op: int, what: str) -> Tensor:
        return allreduce(
            own.to(device=device), name=f"{name}.{what}", op=op, process_set=request.process_set
        ).cpu()

    lines = [*request.lines(), f"engine refused: {refusal or 'no'}"]
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "little")
    gradients = [param.grad for param in request.params]
    dims = [0 if each is None or not each.is_sparse else each.sparse_dim() for each in gradients]
    # A sum, because a rank in join() adds zeros to a sum and answers nothing else.
    table = torch.zeros(native.size, 3, dtype=torch.int64)
    table[native.rank] = torch.tensor([1, digest, int(any(dims))])
    table = reduced(table, Sum, "request")
    present = table[table[:, 0] == 1]
    all_here = len(present) == native.size
    if len(set(present[:, 1].tolist())) > 1:
        what = "parameters and arguments must be equal on all ranks"
        if all_here:
            every = allgather_object(lines, name=f"{name}.lines", process_set=request.process_set)
            what += _difference(every, native.ranks)
        raise ConfigError(f"hvd.DistributedOptimizer: {what}")
    agreed = reduced(torch.tensor(dims), Max, "sparse").tolist() if present[:, 2].any() else []
    return all_here, {index: count for index, count in enumerate(agreed) if count}


def _difference(every: list[list[str]], ranks: Sequence[int]) -> str:
    for rank, other in zip(ranks, every, strict=True):
        for ours, theirs in itertools.zip_longest(every[0], other, fillvalue="nothing"):
            if ours != theirs:
                return f", got {ours!r} on rank {ranks[0]} and {theirs!r} on rank {rank}"
    return ""
