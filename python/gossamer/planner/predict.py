# The planner's one pure function: a model and a network in, the step of an algorithm out.
# Callers: the command, plots.py, benchmarks/netlab/validate_planner.py and users.
"""Predictions of step times and bytes."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gossamer.algorithms import Algorithm
from gossamer.errors import ConfigError
from gossamer.facts import Cost, Settings
from gossamer.planner.messages import PricedMessages
from gossamer.planner.methods import METHODS, Stock, method_of
from gossamer.planner.network import Network
from gossamer.planner.problem import Problem
from gossamer.planner.schedule import simulate
from gossamer.planner.stock import stock_traffic


@dataclass(frozen=True)
class Prediction:
    """The prediction of a mean step.

    Args:
        step_s: seconds of the step.
        compute_s: seconds of a step without communication.
        communication_s: seconds in which a rank sends or prepares to send, beside the compute or not.
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
        """For a line of JSON."""
        return {**asdict(self), "efficiency": self.efficiency}


def predict(
    problem: Problem,
    network: Network,
    algorithm: str | Algorithm | Stock,
    *,
    settings: Settings | None = None,
    flat: bool = False,
) -> Prediction:
    """One algorithm's step. Pure: nothing is sent and nothing is measured.

    Args:
        algorithm: a name of METHODS, or an object with settings of your own.
        settings: of a name.
        flat: with process_group=gossamer.Flat(). False: by hosts where the network has several with several ranks.

    Raises:
        ConfigError: an unknown algorithm.
    """
    name, warm, chosen = repr(algorithm), True, algorithm
    if isinstance(algorithm, str):
        method = method_of(algorithm)
        name, warm = algorithm, method.warm
        chosen = method.make(settings or Settings())
    if isinstance(chosen, Stock):
        outcome = simulate(problem, stock_traffic(problem, network, chosen), Cost())
    elif isinstance(chosen, Algorithm):
        messages = PricedMessages(problem, network, chosen, flat=flat)
        outcome = simulate(problem, chosen.traffic(messages, warm=warm), messages.agreement())
    else:
        raise ConfigError(f"predict: algorithm must be a name, an Algorithm or a Stock, got {chosen!r}")
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
    """The predictions of all names, the quickest first."""
    found = (predict(problem, network, name, settings=settings) for name in names)
    return sorted(found, key=lambda each: each.step_s)
