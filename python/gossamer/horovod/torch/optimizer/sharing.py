"""``adopt`` and ``keep_identity``: one optimizer's groups and state under two classes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def adopt(optimizer: torch.optim.Optimizer, kind: type, *, module: str) -> Any:
    """Returns an object that shares everything with the optimizer. Its new class has two bases: `kind` and its class.

    Args:
        module: the ``__module__`` of the new class, by which Horovod's helpers know its optimizers.
    """
    own = type(optimizer)
    # Optimizer.__getstate__ keeps nothing of this class, so a copy would reduce nothing.
    names = {"__module__": module, "__doc__": own.__doc__, "__reduce_ex__": _refuse_copy}
    made = type(own.__name__, (kind, own), names)
    adopted: Any = made.__new__(made)  # type: ignore[call-overload]  # without __init__, which would reset the state
    adopted.__dict__.update(optimizer.__dict__)
    # A scheduler has wrapped the optimizer's own step(), which would bypass this class.
    adopted.__dict__.pop("step", None)
    return adopted


@contextlib.contextmanager
def keep_identity(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keeps the objects that hold groups and state, and gives them the new contents afterwards.

    torch's load_state_dict() replaces these objects, which others share.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    if optimizer.param_groups is not groups and len(optimizer.param_groups) == len(groups):
        for group, new in zip(groups, optimizer.param_groups, strict=True):
            group.clear()
            group.update(new)
        optimizer.param_groups = groups
    if optimizer.state is not state:
        new_state = dict(optimizer.state)
        state.clear()
        state.update(new_state)
        optimizer.state = state


def _refuse_copy(optimizer: Any, protocol: Any) -> Any:
    raise TypeError(
        f"hvd.DistributedOptimizer: {type(optimizer).__name__} cannot be copied or pickled, because its reductions "
        f"belong to this process; copy its state_dict(), or the optimizer that it was made of"
    )
