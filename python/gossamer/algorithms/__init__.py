"""The algorithms, and the table of their names. A new algorithm is one file and one line here."""

from gossamer.algorithms.async_model_average import AsyncModelAverage
from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.bytegrad import ByteGrad
from gossamer.algorithms.comm_hook import CommHook
from gossamer.algorithms.decentralized import Decentralized
from gossamer.algorithms.gradient_allreduce import GradientAllReduce
from gossamer.algorithms.local_sgd import LocalSGD
from gossamer.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from gossamer.algorithms.powersgd import PowerSGD
from gossamer.algorithms.qadam import OneBitAdam, QAdam, QAdamOptimizer
from gossamer.algorithms.sharded import Sharded, ShardedOptimizer
from gossamer.algorithms.zero_one_adam import ZeroOneAdam, ZeroOneAdamOptimizer
from gossamer.errors import ConfigError

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        GradientAllReduce,
        ByteGrad,
        PowerSGD,
        QAdam,
        OneBitAdam,
        ZeroOneAdam,
        Decentralized,
        LowPrecisionDecentralized,
        LocalSGD,
        AsyncModelAverage,
        Sharded,
    )
}
"""The algorithms, by the names that `algorithm=` takes."""


def resolve(algorithm: "str | Algorithm") -> Algorithm:
    """Returns the algorithm of a name, with default settings. Returns an Algorithm as it is.

    Raises:
        ConfigError: the name is unknown (the message lists the known names), or the type is another.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]()
    known = ", ".join(sorted(ALGORITHMS))
    raise ConfigError(f"algorithm: must be an Algorithm object or one of {known}, got {algorithm!r}")


__all__ = ["ALGORITHMS", "Algorithm", "resolve"]
__all__ += ["AsyncModelAverage", "ByteGrad", "CommHook", "Decentralized", "GradientAllReduce", "LocalSGD"]
__all__ += ["LowPrecisionDecentralized", "OneBitAdam", "PowerSGD", "QAdam", "Sharded", "ZeroOneAdam"]
__all__ += ["QAdamOptimizer", "ShardedOptimizer", "ZeroOneAdamOptimizer"]
