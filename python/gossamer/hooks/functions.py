"""The hooks: second argument of ddp.register_comm_hook(gs.hooks.State(ddp), ...), and `register`, their native path.

Each replaces DDP's gradients by their mean over the ranks. None blocks: a worker thread completes the future. The two
wrappers give any hook of the form `(state, bucket) -> Future` its buckets in 16 bits. Torch has the same two. Its bf16
wrapper refuses CPU groups; these work wherever the inner hook works.
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
AnyHook = Callable[[Any, dist.GradBucket], Future]


def _hook(name: str, text: str) -> Hook:
    def hook(state: State, bucket: dist.GradBucket) -> Future:
        return _checked(name, state).run(name, bucket)

    hook.__name__ = hook.__qualname__ = name
    hook.__module__ = "gossamer.hooks"
    hook.__doc__ = text
    return hook


HOOKS: dict[str, Hook] = {name: _hook(name, f"It {method.changes}.") for name, method in METHODS.items()}
"""Every hook by its name: the methods of the algorithms that may be hooks, and `compress`."""

HOOKS["compress"] = _hook("compress", "It sends through State(codec=...).")

bytegrad: Hook = HOOKS["bytegrad"]
"""Int8, a quarter of float32's bytes. What rounding loses stays lost."""

int8: Hook = HOOKS["int8"]
"""Int8 with error feedback: what one step leaves out, the next one adds."""

int4: Hook = HOOKS["int4"]
"""Int4 with error feedback, a seventh of float32's bytes."""

onebit: Hook = HOOKS["onebit"]
"""OneBit with error feedback, a twenty-eighth of float32's bytes. Needs a warm-up, as 1-bit SGD does."""

deterministic: Hook = HOOKS["deterministic"]
"""The exact mean, summed in rank order. Neither DDP's buckets nor the group's backend change a bit."""

bf16: Hook = HOOKS["bf16"]
"""Sends bfloat16 and sums in float32. Works in CPU groups, which torch's bf16_compress_hook refuses."""

fp16: Hook = HOOKS["fp16"]
"""Sends float16 and sums in float32."""

compress: Hook = HOOKS["compress"]
"""Sends through State(codec=...), which is any codec, with or without ErrorFeedback, or an Adaptive."""

powersgd: Hook = HOOKS["powersgd"]
"""PowerSGD of rank 4, or State(powersgd=gs.PowerSGD(...)). `start_step` counts backwards."""


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


def bf16_wrapper(hook: AnyHook) -> AnyHook:
    """Returns a hook that gives `hook` the bucket in bfloat16. The result returns to the gradients' own dtype."""
    return _in_dtype(hook, torch.bfloat16)


def fp16_wrapper(hook: AnyHook) -> AnyHook:
    """Returns a hook that gives `hook` the bucket in float16, where gradients above 65504 become Inf."""
    return _in_dtype(hook, torch.float16)


def _in_dtype(hook: AnyHook, dtype: torch.dtype) -> AnyHook:
    if not callable(hook):
        raise ConfigError(f"hooks: a wrapper must be given a hook, got {hook!r}")

    def wrapper(state: object, bucket: dist.GradBucket) -> Future:
        own = bucket.buffer()
        bucket.set_buffer(own.to(dtype))
        return hook(state, bucket).then(lambda done: own.copy_(_tensor_of(done)))

    wrapper.__qualname__ = f"{getattr(hook, '__qualname__', type(hook).__name__)} in {dtype}"
    return wrapper


def _tensor_of(done: "torch.futures.Future[Any]") -> Tensor:
    value = done.value()
    result: Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return result
