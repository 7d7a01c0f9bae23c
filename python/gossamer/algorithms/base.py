"""What an algorithm is: the moments of a step at which it may act. The default at each moment is nothing.

An algorithm reads like its paper: straight-line blocking code, called by the engine at the right moment, on the
right thread, in the same order on every rank. See docs/adding-an-algorithm.md.
"""

from abc import ABC
from typing import Any, ClassVar

from gossamer import _C
from gossamer.comm import Communicator


class Algorithm(ABC):
    """Subclass, override the moments you need, and add one line to the name table in __init__.py.

    Either `native_work` returns an object of gossamer._C that does a bucket's work without the GIL, or
    `bucket_ready` does it in Python. Ranks compare their algorithms' repr, which shows the public attributes.
    """

    #: The name that DataParallel(algorithm="...") takes.
    name: ClassVar[str]

    def __repr__(self) -> str:
        settings = (f"{name}={value!r}" for name, value in sorted(vars(self).items()) if name[0] != "_")
        return f"{type(self).__name__}({', '.join(settings)})"

    def block(self) -> int:
        """Parameters start at multiples of this many elements in a bucket's flat memory (and of 64 bytes)."""
        return 1

    def alignment(self, comm: Communicator) -> int:
        """Bucket sizes are padded to a multiple of this many elements."""
        return 1

    def setup(self, comm: Communicator, buckets: list[Any]) -> None:
        """Called at wrap, and again whenever the plan changes; `buckets` is then the new plan."""

    def native_work(self) -> "_C.BucketWork | None":
        """The native work of a bucket, or None: bucket_ready does it."""
        return None

    def before_forward(self, step: int) -> None:
        """In the training thread, before each training forward; `step` counts optimizer steps."""

    def bucket_ready(self, bucket: Any) -> None:
        """On the engine's worker thread, in bucket order, when all gradients of `bucket` are in place.

        `bucket.flat()` is the flat gradient [numel]; change it in place. Blocking is fine: backward goes on.
        """
        raise NotImplementedError(f"{type(self).__name__} must define native_work or bucket_ready")

    def after_step(self, step: int) -> None:
        """In the training thread, after each optimizer step; `step` includes the one that just ended."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, keyed by parameter name where it belongs to one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what state_dict returned."""
        if state:
            raise KeyError(f"{type(self).__name__} has no state, got the keys {sorted(state)}")
