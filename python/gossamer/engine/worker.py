"""How the engine and an algorithm meet: the moments that the engine calls, the worker that the algorithm may use, and
the context that errors get on their way from one to the other. Used by engine.py.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from gossamer import _C
from gossamer.codec import Codec
from gossamer.comm import Communicator
from gossamer.errors import CodecError, CommError, ConfigError, GossamerError


class Moments(Protocol):
    """What the engine asks of an algorithm (gossamer.algorithms.Algorithm)."""

    fields: ClassVar[tuple[str, ...]]
    state_fields: ClassVar[tuple[str, ...]]
    deterministic: bool

    average: bool
    uneven_inputs: ClassVar[bool]
    follows_gradients: ClassVar[bool]

    @property
    def lockstep(self) -> bool: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...

    def connect(self, worker: Any) -> None: ...
    def block(self) -> int: ...
    def group_of(self, name: str, param: torch.Tensor) -> Hashable: ...
    def alignment(self, comm: Communicator) -> int: ...
    def bucket_limit(self, model_bytes: int) -> int | None: ...
    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None: ...
    def native_work(self, bucket: _C.Bucket) -> Any: ...
    def codec_of(self, bucket: _C.Bucket) -> Codec | None: ...
    def codec_choices(self, extra: Sequence[Codec | None]) -> list[Codec | None]: ...
    def use_codecs(self, codecs: Mapping[str, Codec | None]) -> None: ...
    def before_forward(self, step: int) -> None: ...
    def gradient_ready(self, name: str, param: nn.Parameter) -> None: ...
    def bucket_ready(self, bucket: _C.Bucket) -> None: ...
    def after_backward(self, missing: Sequence[tuple[str, nn.Parameter]]) -> None: ...
    def before_step(self, step: int) -> None: ...
    def after_step(self, step: int) -> None: ...
    def settle(self) -> None: ...
    def after_consensus(self) -> None: ...
    def leave(self) -> None: ...
    def close(self, *, crashed: bool = False) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Worker:
    """The engine's worker thread, as algorithms see it; holds no engine alive."""

    def __init__(self, native: Any, comm: Communicator) -> None:
        # The native engine holds the buckets' work, which may hold the algorithm, which holds this.
        self._native = weakref.ref(native)
        self._comm = comm
        self._closed = False

    def submit(self, task: Callable[[], object], what: str) -> None:
        """Queues `task` behind everything before it; all ranks submit the same, in the same order."""
        self._alive().worker.submit(with_context(task, f"{what} raised", self._comm), what)

    def wait(self) -> None:
        """Until all is done that was submitted; raises its error."""
        self._alive().worker.wait()

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken so far; any thread."""
        return int(self._alive().lockstep.optimizer_steps)

    def close(self) -> None:
        """Called by the engine when it ends."""
        self._closed = True

    @property
    def alive(self) -> bool:
        """Whether its engine is."""
        return not self._closed and self._native() is not None

    def _alive(self) -> Any:
        native = self._native()
        if native is None:
            raise ConfigError("engine: the wrapper of this algorithm's model is gone; wrap the model again")
        return native


def agree_on_finite(comm: Communicator, bucket: _C.Bucket) -> None:
    """For a bucket_ready that leaves gradients to their ranks: a NaN or Inf on any rank becomes one on all of them.

    A GradScaler then skips the step on all ranks. Collective.
    """
    _C.AgreeOnFinite().run(comm, bucket)


def bucket_ready_of(algorithm: Moments, comm: Communicator) -> Callable[[Any], None]:
    """What the native engine calls for a bucket: algorithm.bucket_ready, with the place in its errors."""

    # Holds no engine: the worker thread must never be the one to drop the last reference to its own.
    def call(bucket: _C.Bucket) -> None:
        what = f"step {bucket.step} {bucket!r}: {algorithm!r}.bucket_ready raised"
        with_context(lambda: algorithm.bucket_ready(bucket), what, comm)()

    return call


def with_context(task: Callable[[], object], what: str, comm: Communicator) -> Callable[[], None]:
    """The task, with rank and `what` in the text of its errors."""

    def call() -> None:
        try:
            with torch.no_grad():
                task()
        except Exception as error:
            known = (ConfigError, CodecError, CommError)
            kind = next((each for each in known if isinstance(error, each)), GossamerError)
            raise kind(f"rank {comm.rank}/{comm.size} {what} {error!r}") from error

    return call


def weak_call(method: "weakref.WeakMethod[Any]") -> Callable[..., None]:
    """Calls the method while its object lives: the native engine, and hooks on tensors, must not keep it alive."""

    def call(*args: Any) -> None:
        bound = method()
        if bound is not None:
            bound(*args)

    return call
