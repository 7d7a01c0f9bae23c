"""Bagua's algorithms, and the registry of their names."""

from gossamer.bagua.torch_api.algorithms import (
    async_model_average,
    base,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from gossamer.bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

for _name, _algorithm in {
    "gradient_allreduce": gradient_allreduce.GradientAllReduceAlgorithm,
    "bytegrad": bytegrad.ByteGradAlgorithm,
    "decentralized": decentralized.DecentralizedAlgorithm,
    "low_precision_decentralized": decentralized.LowPrecisionDecentralizedAlgorithm,
    "qadam": q_adam.QAdamAlgorithm,
    "async": async_model_average.AsyncModelAverageAlgorithm,
}.items():
    GlobalAlgorithmRegistry.register(_name, _algorithm)

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "base",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
]
