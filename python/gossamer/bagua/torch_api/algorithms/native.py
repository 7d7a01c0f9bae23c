"""Bagua's own algorithms, which run on Gossamer's native engine: what their classes share."""

from collections.abc import Sequence
from typing import Any

import torch

from gossamer import algorithms
from gossamer.bagua.torch_api.algorithms.base import Algorithm
from gossamer.errors import ConfigError


class NativeImpl:
    """A built-in algorithm at work in one model; `model.bagua_algorithm`. Not an AlgorithmImpl: it has no hooks.

    Args:
        native: gossamer's algorithm, which runs on the native engine.
        by_hosts: sums go inside hosts first and then across, where the codec is.
    """

    tunable = True  # by BAGUA_AUTOTUNE; gossamer's algorithm may refuse it still

    def __init__(self, process_group: Any, native: algorithms.Algorithm, *, by_hosts: bool = False) -> None:
        self.process_group, self.native, self.by_hosts = process_group, native, by_hosts

    def use_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Called at wrap, with the optimizers that with_bagua() was given."""
        if self.native.needs_optimizer and not optimizers:
            raise ConfigError(f"with_bagua: {self.native!r} counts optimizer steps; give the optimizers")
        self.native.use_optimizers(optimizers)


class NativeAlgorithm(Algorithm):
    """Declares a NativeImpl."""

    hierarchical: bool

    def native(self) -> algorithms.Algorithm:
        """A new one of gossamer's algorithms, with these settings."""
        raise NotImplementedError

    def reify(self, process_group: Any) -> NativeImpl:
        return NativeImpl(process_group, self.native())
