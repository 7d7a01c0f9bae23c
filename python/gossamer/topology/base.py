"""The base class of topologies, and functions that say how well a topology averages. Nothing is sent here.

A new topology is one class that derives from Topology, and one line in TOPOLOGIES.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from gossamer.errors import ConfigError


@dataclass(frozen=True)
class Exchange:
    """One message to rank `to` and one from rank `source`, at the same time. `weight` belongs to the received one."""

    to: int
    source: int
    weight: float


@dataclass(frozen=True)
class Mixing:
    """What one rank does in one round: x <- own * x + sum(weight * received). The weights sum to 1.

    Ranks may make their exchanges one after the other: in this order they never wait in a circle. A rank without
    exchanges is idle in the round.
    """

    own: float
    exchanges: tuple[Exchange, ...]


IDLE = Mixing(1.0, ())


class Topology(ABC):
    """A schedule of averaging. In every round the weights of all ranks form a doubly stochastic matrix.

    So the mean over the ranks never changes.
    """

    #: Whether the average is the exact mean of all ranks, by an all-reduce. There are no exchanges then.
    uniform: ClassVar[bool] = False

    @abstractmethod
    def period(self, size: int) -> int:
        """Returns the number of rounds until the schedule repeats, at least 1. Raises ConfigError unless size >= 1."""

    @abstractmethod
    def mixing(self, step: int, size: int, rank: int) -> Mixing:
        """Returns what `rank` of `size` does in round `step`, counted from 0.

        Raises ConfigError unless step >= 0, size >= 1 and 0 <= rank < size, all of them int.
        """

    def __repr__(self) -> str:
        # Ranks compare this text, so it must show every setting and no address.
        settings = (f"{name}={value!r}" for name, value in sorted(vars(self).items()) if name[0] != "_")
        return f"{type(self).__name__}({', '.join(settings)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def mixing_matrix(topology: Topology, step: int, size: int) -> list[list[float]]:
    """Returns `[size][size]`: row r holds the weights with which rank r averages all ranks' values in round `step`.

    Raises ConfigError as `Topology.mixing` does.
    """
    check(topology, step=step, size=size)
    if topology.uniform:
        return [[1 / size] * size for _ in range(size)]
    matrix = [[0.0] * size for _ in range(size)]
    for rank, row in enumerate(matrix):
        mixing = topology.mixing(step, size, rank)
        row[rank] = mixing.own
        for exchange in mixing.exchanges:
            row[exchange.source] += exchange.weight
    return matrix


def consensus_steps(topology: Topology, size: int, tolerance: float = 1e-12, limit: int = 1000) -> int | None:
    """Counts the rounds from step 0 until every rank holds the mean of all ranks' first values. For planning.

    The mean is reached when no entry of the product of the rounds' matrices differs from 1 / size by more than
    `tolerance`; the default allows rounding only. Returns None if that takes more than `limit` rounds. Memory:
    O(size^2). Raises ConfigError unless size >= 1, tolerance >= 0 and limit >= 0.
    """
    check(topology, size=size)
    if not (tolerance >= 0 and is_int(limit) and limit >= 0):
        raise ConfigError(
            f"consensus_steps: tolerance must be >= 0 and limit an int >= 0, got {tolerance!r} and {limit!r}"
        )
    product = [[float(row == column) for column in range(size)] for row in range(size)]
    for done in range(limit + 1):
        if all(abs(entry - 1 / size) <= tolerance for row in product for entry in row):
            return done
        matrix = mixing_matrix(topology, done, size)
        product = [_combined(weights, product) for weights in matrix]
    return None


def _combined(weights: list[float], rows: list[list[float]]) -> list[float]:
    taken = [(weight, row) for weight, row in zip(weights, rows, strict=True) if weight]  # few: it is sparse
    return [sum(weight * row[column] for weight, row in taken) for column in range(len(weights))]


def is_int(value: object) -> bool:
    """Whether the value is an int and no bool. A bool as a rank is a mistake."""
    return isinstance(value, int) and not isinstance(value, bool)


def check(topology: Topology, *, size: int, step: int = 0, rank: int = 0) -> None:
    """Raises ConfigError unless size >= 1, 0 <= rank < size and step >= 0, all of them int."""
    if not (is_int(size) and size >= 1):
        raise ConfigError(f"{topology!r}: size must be an int >= 1, got {size!r}")
    if not (is_int(rank) and 0 <= rank < size):
        raise ConfigError(f"{topology!r}: rank must be an int from 0 to size - 1 = {size - 1}, got {rank!r}")
    if not (is_int(step) and step >= 0):
        raise ConfigError(f"{topology!r}: step must be an int >= 0, got {step!r}")
