"""The hooks: second argument of ddp.register_comm_hook(gs.hooks.State(ddp), ...), and `register`, their native path.

Each replaces DDP's gradients by their mean over the ranks. None blocks: the future is completed by a worker thread.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gossamer.errors import ConfigError
from gossamer.hooks.state import State
from gossamer.torch_private import reduces_in_python

Future = torch.futures.Future[Tensor]


def bytegrad(state: State, bucket: dist.GradBucket) -> Future:
    """Int8, a quarter of float32's bytes; what is lost stays lost."""
    return _run("bytegrad", state, bucket)


def int8(state: State, bucket: dist.GradBucket) -> Future:
    """Int8 with error feedback: what one step loses, the next one adds."""
    return _run("int8", state, bucket)


def int4(state: State, bucket: dist.GradBucket) -> Future:
    """Int4 with error feedback, a seventh of float32's bytes."""
    return _run("int4", state, bucket)


def onebit(state: State, bucket: dist.GradBucket) -> Future:
    """OneBit with error feedback, a twenty-eighth of float32's bytes. Warm up, as for 1-bit SGD."""
    return _run("onebit", state, bucket)


def deterministic(state: State, bucket: dist.GradBucket) -> Future:
    """Exact, summed in rank order in float32: the same bits whatever DDP's buckets and the group's backend are."""
    return _run("deterministic", state, bucket)


def bf16(state: State, bucket: dist.GradBucket) -> Future:
    """bfloat16 on the wire, float32 sums. Works in CPU groups, where stock DDP refuses torch's bf16_compress_hook."""
    return _run("bf16", state, bucket)


def fp16(state: State, bucket: dist.GradBucket) -> Future:
    """float16 on the wire, float32 sums."""
    return _run("fp16", state, bucket)


def compress(state: State, bucket: dist.GradBucket) -> Future:
    """Through State(codec=...): any codec, with or without ErrorFeedback, or an Adaptive that chooses by parameter."""
    return _run("compress", state, bucket)


def powersgd(state: State, bucket: dist.GradBucket) -> Future:
    """PowerSGD, of rank 4 unless State(powersgd=gs.PowerSGD(...)) says otherwise; `start_step` counts backwards."""
    return _run("powersgd", state, bucket)


_HOOKS = (bytegrad, int8, int4, onebit, deterministic, bf16, fp16, compress, powersgd)


def register(model: DistributedDataParallel, state: State, hook: Callable[..., Any]) -> None:
    """model.register_comm_hook(state, hook) for a hook of this package, called in C++ without the GIL.

    Collective: the connections are made here. Buckets of codecs with native arithmetic then see no Python, but when DDP
    has made its buckets anew.

    Raises:
        ConfigError: another hook; a model that is no DistributedDataParallel, or whose reducer is torch's Python one.
    """
    if not isinstance(model, DistributedDataParallel) or not isinstance(model.reducer, dist.Reducer):
        raise ConfigError(
            f"hooks.register: model must be a DistributedDataParallel, got {type(model).__name__}"
        )
    if hook not in _HOOKS:
        known = ", ".join(each.__name__ for each in _HOOKS)
        raise ConfigError(
            f"hooks.register: hook must be one of {known}, got {hook!r}; use model.register_comm_hook"
        )
    if reduces_in_python():
        raise ConfigError(
            "hooks.register: torch's python_reducer calls Python hooks only; use model.register_comm_hook"
        )
    _checked(hook.__name__, state).start(hook.__name__).register(model.reducer)


def _run(hook: str, state: State, bucket: dist.GradBucket) -> Future:
    return _checked(hook, state).run(hook, bucket)


def _checked(hook: str, state: Any) -> State:
    if not isinstance(state, State):
        raise ConfigError(f"hooks.{hook}: the state must be a gossamer.hooks.State, got {state!r}")
    return state
