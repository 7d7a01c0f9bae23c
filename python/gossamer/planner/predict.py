# The planner's one pure function: a model and a network in, the step of an algorithm out.
# Callers: the command, plots.py, benchmarks/netlab/validate_planner.py and users.
"""Predictions of step times and bytes."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gossamer.algorithms import Algorithm
from gossamer.planner.methods import METHODS, Settings, Stock, method_of
from gossamer.planner.network import Network
from gossamer.planner.problem import Problem
from gossamer.planner.schedule import simulate
from gossamer.planner.stock import stock_traffic
from gossamer.planner.traffic import traffic_of


@dataclass(frozen=True)
class Prediction:
    """Of a mean step.

    Args:
        step_s: seconds.
        compute_s: of a step without communication.
        communication_s: in which a rank sends, or prepares what it sends; beside the compute or not.
        exposed_s: that no compute hides: step_s - compute_s.
        bytes_per_rank: that a rank hands to other ranks, as model.engine.bytes_sent counts them.
        bytes_across: that leave a host for others.
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
    by_hosts: bool = False,
) -> Prediction:
    """One algorithm's step. Pure: nothing is sent and nothing is measured.

    Args:
        algorithm: a name of METHODS, or an object with settings of your own.
        settings: of a name.
        by_hosts: an object is used with process_group=gossamer.Hierarchical().

    Raises:
        ConfigError: an unknown algorithm, or one that the network does not admit.
    """
    name, warm, chosen = repr(algorithm), True, algorithm
    if isinstance(algorithm, str):
        method = method_of(algorithm)
        name, warm, by_hosts = algorithm, method.warm, method.by_hosts
        chosen = method.make(settings or Settings())
    if isinstance(chosen, Stock):
        traffic = stock_traffic(problem, network, chosen)
    else:
        assert not isinstance(chosen, str)
        traffic = traffic_of(problem, network, chosen, warm=warm, by_hosts=by_hosts)
    outcome = simulate(problem, traffic)
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
    """Of each name that the network admits, the quickest first. A hierarchy needs several hosts of equal size."""
    equal = network.hosts > 1 and network.per_host > 1 and network.per_host * network.hosts == network.ranks
    fitting = [name for name in names if equal or not method_of(name).by_hosts]
    return sorted(
        (predict(problem, network, name, settings=settings) for name in fitting), key=lambda each: each.step_s
    )
