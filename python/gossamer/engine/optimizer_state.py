"""Copies the state of one rank's optimizer to all ranks, also to a rank that has no state yet. Used by join.py.

The state travels as torch.save() writes it, and is read without unpickling objects. All ranks refuse a state that needs
more than tensors and plain values.
"""

import io
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.comm import Communicator
from gossamer.engine.agree import broadcast_bytes
from gossamer.errors import ConfigError
from gossamer.torch_private import keystr, tree_flatten_with_path, tree_map

_SENT, _REFUSED = b"\0", b"\1"


class CannotCopyError(ConfigError):
    """An optimizer's state cannot be copied. Every rank raises it."""


def copy_state(
    control: Communicator, optimizer: torch.optim.Optimizer, source: int, *, ignored: Collection[int] = ()
) -> None:
    """Copy the state and the hyper-parameters of rank `source` to all ranks. Collective.

    Args:
        ignored: ids of parameters whose state belongs to each rank. It is neither sent nor changed.

    Raises:
        CannotCopyError: on every rank. The state holds more than tensors and plain values.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = {index: param for index, param in enumerate(params) if id(param) in ignored}
    data = _packed(optimizer, own) if control.rank == source else b""
    data = broadcast_bytes(control, data, source)
    if data[-1:] == _REFUSED:
        raise CannotCopyError(
            f"join: the state of {type(optimizer).__name__} must consist of tensors, numbers and strings to be copied "
            f"to the other ranks, got {data[:-1].decode()}; keep it elsewhere"
        )
    if control.rank == source:
        return
    kept = {param: optimizer.state[param] for param in own.values() if param in optimizer.state}
    file = io.BytesIO(memoryview(data)[:-1])
    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    optimizer.state.update(kept)


def _packed(optimizer: torch.optim.Optimizer, own: Collection[int]) -> bytes:
    whole = optimizer.state_dict()
    shared = {index: state for index, state in whole["state"].items() if index not in own}
    state = tree_map(_plain, {**whole, "state": shared})
    problem = _problem_of(
        tree_map(lambda leaf: None if type(leaf) in (Tensor, nn.Parameter) else leaf, state)
    )
    if problem:
        return problem.encode() + _REFUSED
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0, io.SEEK_END)
    file.write(_SENT)
    return file.getvalue()


def _plain(leaf: Any) -> Any:
    """Turn numpy's scalars into Python's. A learning rate from np.cos() is no plain float."""
    is_scalar = not isinstance(leaf, Tensor) and getattr(leaf, "shape", None) == () and hasattr(leaf, "item")
    return leaf.item() if is_scalar else leaf


def _problem_of(state: Any) -> str:
    """Return the first value that the receiver could not read, and its place; empty if there is none."""
    if _is_readable(state):
        return ""
    for path, leaf in tree_flatten_with_path(state)[0]:
        if not _is_readable(leaf):
            return f"a {type(leaf).__qualname__} at {keystr(path)}"
    return "a container of another kind"


def _is_readable(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # a class of the user may raise anything when it is pickled
        return False
    return True
