"""The hooks: second argument of ddp.register_comm_hook(gs.hooks.State(ddp), ...), and `register`, their native path.

Each replaces DDP's gradients by their mean over the ranks. None blocks: a worker thread completes the future.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gossamer.errors import ConfigError
from gossamer.hooks.buckets import METHODS
from gossamer.hooks.state import State
from gossamer.torch_private import reduces_in_python

Future = torch.futures.Future[Tensor]
Hook = Callable[[State, dist.GradBucket], Future]


def _hook(name: str, text: str) -> Hook:
    def hook(state: State, bucket: dist.GradBucket) -> Future:
        return _checked(name, state).run(name, bucket)

    hook.__name__ = hook.__qualname__ = name
    hook.__module__ = "gossamer.hooks"
    hook.__doc__ = text
    return hook


#: Every hook by its name: the methods of algorithms that may be hooks, and `compress`.
HOOKS: dict[str, Hook] = {name: _hook(name, method.hook or "") for name, method in METHODS.items()}
HOOKS["compress"] = _hook(
    "compress",
    "Sends through State(codec=...), which is any codec, with or without ErrorFeedback, or an Adaptive.",
)


def register(model: DistributedDataParallel, state: State, hook: Callable[..., Any]) -> None:
    """Registers a hook of this package so that DDP calls it in C++ without the GIL.

    Takes the place of model.register_comm_hook(state, hook). Collective: it makes the connections. If the codec is
    native, Python runs only when DDP has planned its buckets again.

    Raises:
        ConfigError: the hook is not one of this package, the model is not a DistributedDataParallel, or torch's Python
            reducer is in use.
    """
    if not isinstance(model, DistributedDataParallel) or not isinstance(model.reducer, dist.Reducer):
        raise ConfigError(
            f"hooks.register: model must be a DistributedDataParallel, got {type(model).__name__}"
        )
    if hook not in HOOKS.values():
        known = ", ".join(HOOKS)
        raise ConfigError(
            f"hooks.register: hook must be one of {known}, got {hook!r}; use model.register_comm_hook"
        )
    if reduces_in_python():
        raise ConfigError(
            "hooks.register: torch's python_reducer calls Python hooks only; use model.register_comm_hook"
        )
    _checked(hook.__name__, state).start(hook.__name__).register(model.reducer)


def _checked(hook: str, state: Any) -> State:
    if not isinstance(state, State):
        raise ConfigError(f"hooks.{hook}: the state must be a gossamer.hooks.State, got {state!r}")
    return state
