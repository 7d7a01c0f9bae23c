# One optimizer's groups and state under two classes: its own, and one that reduces gradients. Knows nothing of either.
"""``adopt`` and ``keep_identity``."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def adopt(optimizer: torch.optim.Optimizer, kind: type, *, module: str) -> Any:
    """An object of a new class, `kind` before the optimizer's own, that shares everything with the optimizer.

    Args:
        module: what the class gives as its own; Horovod's helpers know its optimizers by it.
    """
    own = type(optimizer)
    # Optimizer.__getstate__ keeps nothing of this class: a copy would reduce nothing.
    names = {"__module__": module, "__doc__": own.__doc__, "__reduce_ex__": _refuse_copy}
    made = type(own.__name__, (kind, own), names)
    adopted: Any = made.__new__(made)  # type: ignore[call-overload]  # not its __init__, which would begin anew
    adopted.__dict__.update(optimizer.__dict__)
    # What a scheduler has put in front of the optimizer's own step() would go around ours.
    adopted.__dict__.pop("step", None)
    return adopted


@contextlib.contextmanager
def keep_identity(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """After it, groups and state are the objects that they were before, with what has become of them.

    torch's load_state_dict() makes new ones, and leaves those that share them behind.
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
