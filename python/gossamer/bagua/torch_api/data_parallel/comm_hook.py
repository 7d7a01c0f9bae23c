"""A communication hook of torch's DistributedDataParallel as an algorithm of Bagua's. Used by wrapper.py."""

from collections.abc import Callable
from typing import Any

from gossamer import algorithms
from gossamer.bagua.torch_api.algorithms.native import NativeAlgorithm, NativeImpl


class CommHook(NativeImpl):
    """A hook at work in one model."""

    tunable = False  # hooks such as PowerSGD's keep state by a bucket's index


class CommHookAlgorithm(NativeAlgorithm):
    """Declares it."""

    def __init__(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        self._state, self._hook = state, hook

    def native(self) -> algorithms.Algorithm:
        return algorithms.CommHook(self._state, self._hook)

    def reify(self, process_group: Any) -> CommHook:
        return CommHook(process_group, self.native())
