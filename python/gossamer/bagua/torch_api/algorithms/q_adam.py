"""Bagua's qadam, as gossamer.QAdam with Bagua's codec."""

from collections.abc import Sequence

import torch

from gossamer import algorithms
from gossamer.algorithms import QAdamOptimizer
from gossamer.bagua.torch_api.algorithms.base import NativeAlgorithm, NativeImpl
from gossamer.codec import MinMaxUInt8
from gossamer.errors import ConfigError

__all__ = ["QAdamAlgorithm", "QAdamImpl", "QAdamOptimizer"]


class QAdamImpl(NativeImpl):
    """QAdam at work in one model."""

    def require_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if len(optimizers) != 1 or optimizers[0] is not self.declared.optimizer:
            raise ConfigError(
                f"QAdamAlgorithm: with_bagua must be given the algorithm's own optimizer and no other, got "
                f"{[type(optimizer).__name__ for optimizer in optimizers]}"
            )


class QAdamAlgorithm(NativeAlgorithm):
    """Exact gradients while the optimizer warms up; then its momentum, in 8 bits.

    Args:
        q_adam_optimizer: the model's optimizer, a QAdamOptimizer.
        hierarchical: the momentum is exact inside hosts, and 8 bits on the way across.
    """

    impl = QAdamImpl

    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise ConfigError(
                f"QAdamAlgorithm: q_adam_optimizer must be a QAdamOptimizer, got {q_adam_optimizer!r}"
            )
        self.optimizer = q_adam_optimizer
        self.hierarchical = self.by_hosts = hierarchical

    def native(self) -> algorithms.Algorithm:
        return algorithms.QAdam(MinMaxUInt8())
