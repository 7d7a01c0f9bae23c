"""The contract between the engine and an algorithm.

Moments are the methods that the engine calls. Worker is what an algorithm may use of the engine. Errors that pass from
one to the other get their rank, step and bucket here.
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

    def connect(self, worker: "Worker") -> None: ...
    def block(self) -> int: ...
    def group_of(self, name: str, param: torch.Tensor) -> Hashable: ...
    def alignment(self, comm: Communicator) -> int: ...
    def bucket_limit(self, model_bytes: int) -> int | None: ...
    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None: ...
    def native_work(self, bucket: _C.Bucket) -> _C.BucketWork | None: ...
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
    """The engine's worker thread, as algorithms see it. It keeps no engine alive."""

    def __init__(self, native: _C.Engine, comm: Communicator) -> None:
        # The native engine holds the works, a work may hold the algorithm, and the algorithm holds this object.
        self._native = weakref.ref(native)
        self._comm = comm
        self._closed = False

    def submit(self, task: Callable[[], object], what: str) -> None:
        """Queue `task` behind all earlier tasks. All ranks submit the same tasks in the same order.

        Args:
            what: the name of the task in error messages.
        """
        self._alive().worker.submit(with_context(task, f"{what} raised", self._comm), what)

    def wait(self) -> None:
        """Return when all submitted tasks have run; raise the first error."""
        self._alive().worker.wait()

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps so far. Any thread may ask."""
        return self._alive().lockstep.optimizer_steps

    def close(self) -> None:
        """Note that the engine has ended. The engine calls this."""
        self._closed = True

    @property
    def alive(self) -> bool:
        """Whether the engine still works."""
        return not self._closed and self._native() is not None

    def _alive(self) -> _C.Engine:
        native = self._native()
        if native is None:
            raise ConfigError("engine: the wrapper of this algorithm's model is gone; wrap the model again")
        return native


def agree_on_finite(comm: Communicator, bucket: _C.Bucket) -> None:
    """Turn a NaN or Inf in one rank's gradients into a NaN on all ranks. Collective.

    A GradScaler then skips the step on all ranks. For algorithms whose bucket_ready leaves each rank its own gradients.
    """
    _C.AgreeOnFinite().run(comm, bucket)


def bucket_ready_of(algorithm: Moments, comm: Communicator) -> Callable[[_C.Bucket], None]:
    """Return the function that the native engine calls for a bucket: bucket_ready, with the place in its errors."""

    # It holds no engine: the worker thread must not drop the last reference to the engine that owns it.
    def call(bucket: _C.Bucket) -> None:
        what = f"step {bucket.step} {bucket!r}: {algorithm!r}.bucket_ready raised"
        with_context(lambda: algorithm.bucket_ready(bucket), what, comm)()

    return call


def with_context(task: Callable[[], object], what: str, comm: Communicator) -> Callable[[], None]:
    """Return the task with the rank and `what` in the text of its errors."""

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
    """Return a function that calls the method while its object lives, and that does not keep the object alive."""

    def call(*args: Any) -> None:
        bound = method()
        if bound is not None:
            bound(*args)

    return call
