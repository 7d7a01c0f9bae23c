"""The algorithms, and the table of their names. Adding one = one file and one line here."""

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.bytegrad import ByteGrad
from gossamer.algorithms.gradient_allreduce import GradientAllReduce
from gossamer.errors import ConfigError

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        GradientAllReduce,
        ByteGrad,
    )
}


def resolve(algorithm: "str | Algorithm") -> Algorithm:
    """An algorithm from its name, or the algorithm itself.

    Raises:
        ConfigError: an unknown name (the message lists the known), or another type.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]()
    known = ", ".join(sorted(ALGORITHMS))
    raise ConfigError(f"algorithm: must be an Algorithm object or one of {known}, got {algorithm!r}")


__all__ = ["ALGORITHMS", "Algorithm", "ByteGrad", "GradientAllReduce", "resolve"]
