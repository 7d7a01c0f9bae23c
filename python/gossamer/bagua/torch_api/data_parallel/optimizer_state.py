"""Copies the state of optimizers from rank 0 when a model is given an algorithm, as Bagua does, but without pickle.

Tensors and numbers are copied. Everything else, and the structure, must be equal on all ranks before.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.engine import Connections, broadcast_everywhere, require_equal
from gossamer.torch_private import tree_flatten, tree_unflatten

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def broadcast_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], links: Connections, ignored: Collection[int]
) -> None:
    """Copies hyper-parameters and state of rank 0's optimizers to all ranks, in place. Collective.

    Args:
        ignored: ids of parameters whose state is each rank's own.

    Raises:
        ConfigError: on every rank, if optimizers differ in class, structure, shapes, or in what is no number.
    """
    entries = [entry for number, each in enumerate(optimizers) for entry in _entries(number, each, ignored)]
    trees = [tree_flatten(container[key]) for _, container, key in entries]
    kinds = [", ".join(map(_kind, leaves)) for leaves, _ in trees]
    lines = [f"{where}: {kind}" for (where, _, _), kind in zip(entries, kinds, strict=True)]
    require_equal(links.control, lines, "the optimizers' state")
    copies = [[_sendable(leaf) for leaf in leaves] for leaves, _ in trees]
    tensors = [leaf for leaves in copies for leaf in leaves if isinstance(leaf, Tensor)]
    broadcast_everywhere(links.comm, links.control, tensors)
    for (_, container, key), (old, spec), new in zip(entries, trees, copies, strict=True):
        values = [b.item() if type(a) in _NUMBERS else a for a, b in zip(old, new, strict=True)]
        if any(type(a) in _NUMBERS and a != b for a, b in zip(old, values, strict=True)):
            container[key] = tree_unflatten(values, spec)


def _entries(
    index: int, optimizer: torch.optim.Optimizer, ignored: Collection[int]
) -> Iterator[tuple[str, Any, Any]]:
    """Yields each entry of an optimizer's dictionaries: its name, the dictionary and the key."""
    where = f"optimizer {index} {type(optimizer).__name__}"
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(set(group) - {"params", "param_names"}):
            yield f"{where} group {number} {key}", group, key
        for place, param in enumerate(group["params"]):
            state = optimizer.state.get(param, {}) if id(param) not in ignored else {}
            for key in sorted(state, key=str):
                yield f"{where} group {number} parameter {place} {key}", state, key


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"tensor {list(leaf.shape)} {leaf.dtype}"
    return repr(leaf) if leaf is None or isinstance(leaf, str) else type(leaf).__name__


def _sendable(leaf: Any) -> Any:
    """A number as a tensor; anything else as it is."""
    dtype = _NUMBERS.get(type(leaf))
    return leaf if dtype is None else torch.tensor(leaf, dtype=dtype, device="cpu")
