"""What an algorithm may use of the engine's worker thread. Errors get their rank, step and bucket here."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from gossamer import _C
from gossamer.comm import Communicator
from gossamer.errors import CodecError, CommError, ConfigError, GossamerError


class Worker:
    """The engine's worker thread, as algorithms see it. It keeps no engine alive."""

    def __init__(self, native: _C.Engine, comm: Communicator) -> None:
        # The native engine holds the works, a work may hold the algorithm, and the algorithm holds this object.
        self._native = weakref.ref(native)
        self._comm = comm

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

    @property
    def alive(self) -> bool:
        """Whether the engine still works."""
        native = self._native()
        return native is not None and not native.closed

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


def with_context(task: Callable[[], object], what: str, comm: Communicator) -> Callable[[], None]:
    """Return the task with the rank and `what` in the text of its errors."""

    def call() -> None:  # a context manager would cost each bucket a microsecond more
        try:
            with torch.no_grad():
                task()
        except Exception as error:
            known = (ConfigError, CodecError, CommError)
            kind = next((each for each in known if isinstance(error, each)), GossamerError)
            raise kind(f"rank {comm.rank}/{comm.size} {what} {error!r}") from error

    return call


def weak_call(method: "weakref.WeakMethod[Any]") -> Callable[..., Any]:
    """Return a function that calls the method while its object lives, and that does not keep the object alive.

    It returns what the method does, and None once the object is gone.
    """

    def call(*args: Any) -> Any:
        bound = method()
        return bound(*args) if bound is not None else None

    return call
