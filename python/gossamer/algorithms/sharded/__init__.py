"""ZeRO-1: an algorithm, and the optimizer that it works with."""

from gossamer.algorithms.sharded.algorithm import Sharded
from gossamer.algorithms.sharded.optimizer import ShardedOptimizer

__all__ = ["Sharded", "ShardedOptimizer"]
