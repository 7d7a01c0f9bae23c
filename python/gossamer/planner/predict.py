# Callers: the command, plots.py, benchmarks/netlab/validate_planner.py and users.
"""Predicts the step time and the bytes of an algorithm, for a model on a network."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gossamer.algorithms import Algorithm
from gossamer.errors import ConfigError
from gossamer.facts import Cost, Settings
from gossamer.planner.messages import PricedMessages
from gossamer.planner.methods import METHODS, Sharded, Stock, method_of
from gossamer.planner.network import Network
from gossamer.planner.problem import Problem
from gossamer.planner.schedule import simulate
from gossamer.planner.sharded import sharded_traffic
from gossamer.planner.stock import stock_traffic


@dataclass(frozen=True)
class Prediction:
    """The prediction of a mean step.

    Args:
        step_s: seconds of the step.
        compute_s: seconds of a step without communication.
        communication_s: seconds in which a rank sends or prepares to send, also while it computes.
        exposed_s: seconds of communication that no compute hides: step_s - compute_s.
        bytes_per_rank: bytes that a rank hands to other ranks, as model.engine.bytes_sent counts them.
        bytes_across: bytes that leave a host.
    """

    algorithm: str
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    bytes_per_rank: float
    bytes_across: float

    @property
    def efficiency(self) -> float:
        """The share of the step that is compute."""
        return self.compute_s / self.step_s if self.step_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields and the efficiency, for a line of JSON."""
        return {**asdict(self), "efficiency": self.efficiency}


def predict(
    problem: Problem,
    network: Network,
    algorithm: str | Algorithm | Stock | Sharded,
    *,
    settings: Settings | None = None,
    flat: bool = False,
) -> Prediction:
    """Predicts one algorithm's step. Nothing is sent and nothing is measured.

    Args:
        algorithm: a name in METHODS, or an object with your own settings.
        settings: the settings of a method given by name.
        flat: sums go in one level, as with process_group=gossamer.Flat(). False: they go by hosts if the network has
            several hosts with several ranks each.

    Raises:
        ConfigError: the algorithm is unknown.
    """
    name, warm, chosen = repr(algorithm), True, algorithm
    if isinstance(algorithm, str):
        method = method_of(algorithm)
        name, warm = algorithm, method.warm
        chosen = method.make(settings or Settings())
    if isinstance(chosen, Stock):
        outcome = simulate(problem, stock_traffic(problem, network, chosen), Cost())
    elif isinstance(chosen, Sharded):
        outcome = simulate(problem, sharded_traffic(problem, network, chosen), Cost())
    elif isinstance(chosen, Algorithm):
        messages = PricedMessages(problem, network, chosen, flat=flat)
        outcome = simulate(problem, chosen.traffic(messages, warm=warm), messages.agreement())
    else:
        raise ConfigError(
            f"predict: algorithm must be a name, an Algorithm, a Stock or a Sharded, got {chosen!r}"
        )
    return Prediction(
        name,
        outcome.step_s,
        problem.compute_s,
        outcome.communication_s,
        outcome.step_s - problem.compute_s,
        outcome.sent,
        outcome.across,
    )


def predict_all(
    problem: Problem, network: Network, names: Iterable[str] = METHODS, *, settings: Settings | None = None
) -> list[Prediction]:
    """Predicts the step of each named method. Returns the quickest first."""
    found = (predict(problem, network, name, settings=settings) for name in names)
    return sorted(found, key=lambda each: each.step_s)
