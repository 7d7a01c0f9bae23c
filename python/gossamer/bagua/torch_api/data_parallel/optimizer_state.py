"""Copies the state of optimizers from rank 0 when a model is given an algorithm, as Bagua does, but without pickle.

Tensors and numbers are copied. Everything else, and the structure, must be equal on all ranks before.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.comm import Communicator
from gossamer.engine import broadcast_everywhere, broadcast_tensors, require_equal
from gossamer.torch_private import tree_flatten, tree_unflatten


@dataclass
class _Slot:
    """One entry of a dictionary of an optimizer."""

    where: str
    container: Any
    key: Any

    def leaves(self) -> list[Any]:
        found: list[Any] = tree_flatten(self.container[self.key])[0]
        return found

    def replace(self, leaves: list[Any]) -> None:
        spec = tree_flatten(self.container[self.key])[1]
        self.container[self.key] = tree_unflatten(leaves, spec)


def broadcast_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    comm: Communicator,
    control: Communicator,
    ignored: Collection[int] = (),
) -> None:
    """Hyper-parameters and state of rank 0's optimizers, on all ranks. Collective.

    Args:
        comm, control: the group, for tensors on its device and for CPU tensors.
        ignored: ids of parameters whose state is each rank's own.

    Raises:
        ConfigError: on every rank, if optimizers differ in class, structure, shapes, or in what is no number.
    """
    slots = [slot for index, optimizer in enumerate(optimizers) for slot in _slots(index, optimizer, ignored)]
    require_equal(control, [_described(slot) for slot in slots], "the optimizers' state")
    tensors = [leaf for slot in slots for leaf in slot.leaves() if isinstance(leaf, Tensor)]
    broadcast_everywhere(comm, control, tensors)
    _broadcast_numbers(control, slots)


def _broadcast_numbers(control: Communicator, slots: list[_Slot]) -> None:
    numbers = [leaf for slot in slots for leaf in slot.leaves() if _is_number(leaf)]
    whole = torch.tensor([leaf for leaf in numbers if isinstance(leaf, int)], dtype=torch.int64, device="cpu")
    real = torch.tensor(
        [leaf for leaf in numbers if isinstance(leaf, float)], dtype=torch.float64, device="cpu"
    )
    broadcast_tensors(control, [whole, real])
    next_whole, next_real = iter(whole.tolist()), iter(real.tolist())
    for slot in slots:
        leaves = slot.leaves()
        new = [
            type(leaf)(next(next_whole if isinstance(leaf, int) else next_real)) if _is_number(leaf) else leaf
            for leaf in leaves
        ]
        if any(_is_number(old) and old != value for old, value in zip(leaves, new, strict=True)):
            slot.replace(new)


def _slots(index: int, optimizer: torch.optim.Optimizer, ignored: Collection[int]) -> Iterator[_Slot]:
    where = f"optimizer {index} {type(optimizer).__name__}"
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(set(group) - {"params", "param_names"}):
            yield _Slot(f"{where} group {number} {key}", group, key)
        for place, param in enumerate(group["params"]):
            state = optimizer.state.get(param, {}) if id(param) not in ignored else {}
            for key in sorted(state, key=str):
                yield _Slot(f"{where} group {number} parameter {place} {key}", state, key)


def _described(slot: _Slot) -> str:
    return f"{slot.where}: {', '.join(_kind(leaf) for leaf in slot.leaves())}"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"tensor {list(leaf.shape)} {leaf.dtype}"
    if leaf is None or isinstance(leaf, str):
        return repr(leaf)
    return type(leaf).__name__


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (bool, int, float)
