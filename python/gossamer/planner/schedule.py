# Algorithms and networks are not known here. Callers: planner/predict.py.
"""Simulates a step: one queue of the jobs of gossamer.facts.Traffic, beside forward and backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from gossamer.facts import Cost, Job, Traffic
from gossamer.planner.problem import Problem


@dataclass(frozen=True)
class Outcome:
    """The mean step: its seconds, those in which a rank sends or prepares to send, and the bytes of facts.Cost."""

    step_s: float
    communication_s: float
    sent: float
    across: float


class _Step:
    """The state of one step: when the worker is free, and how much the worker's computing delays the backward.

    With fewer than 2 cores a rank, the worker and the network's threads take time from forward and backward.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.free = 0.0  # seconds from the beginning of the step
        self.stolen = 0.0
        self.busy = 0.0
        # The share of the compute's core that the worker takes while it computes.
        self.taken = min(1.0, max(0.0, 2.0 - problem.cores))
        self.slower = 1 / min(1.0, problem.cores)

    def run(self, job: Job, ready: float) -> None:
        cpu_s, beside_s = job.cpu_s * self.slower, job.beside_s * self.slower
        begin = max(self.free, ready + self.stolen)
        wire_s = 2 * job.cost.sent / self.problem.speeds.wire * self.slower  # sent and received
        self.free = begin + cpu_s + max(job.cost.seconds, wire_s, beside_s)
        self.busy += self.free - begin
        self.stolen += (cpu_s + beside_s + wire_s) * self.taken

    @property
    def computed(self) -> float:
        return self.problem.compute_s + self.stolen


def simulate(problem: Problem, traffic: Traffic, agreement: Cost) -> Outcome:
    """Returns the mean step of a long training in which all ranks are alike.

    Args:
        agreement: the cost of the ranks' agreement at the end of a backward. It counts if the traffic is in lockstep.
    """
    agreement = agreement if traffic.lockstep else Cost()
    step = _Step(problem)
    for job in traffic.from_start:
        step.run(job, 0.0)
    forward_s = problem.compute_s * problem.forward
    last_begins = 0.0
    for job in traffic.in_backward:
        ready = forward_s + job.done * problem.backward_s
        last_begins = max(step.free, ready + step.stolen)
        step.run(job, ready)
    agreed = max(last_begins, step.computed) + agreement.seconds if agreement.sent else 0.0
    length = max(step.computed, step.free, agreed)
    own = total([*traffic.from_start, *traffic.in_backward]) + agreement
    length, after_s, share = _with_after(problem, traffic, length)
    cost = own + total([*traffic.after, *chain.from_iterable(traffic.portions)]).times(share)
    return Outcome(length, step.busy + after_s * share, cost.sent, cost.across)


def _with_after(problem: Problem, traffic: Traffic, length: float) -> tuple[float, float, float]:
    """Returns the seconds of the mean step, those of one round of `after` or all portions, and rounds in a step."""
    if traffic.portions:
        return _with_portions(problem, traffic, length)
    if not traffic.after:
        return length, 0.0, 0.0
    alone = _alone(problem, traffic.after)
    if traffic.pause_s is not None:
        # A round begins with a forward, and its result is added before a forward, so it lasts whole steps.
        length += alone.stolen * length / (_whole(alone.free, length) + traffic.pause_s)
        return length, alone.busy, length / (_whole(alone.free, length) + traffic.pause_s)
    share = 1 / traffic.period
    return length + alone.free * share, alone.busy, share


def _with_portions(problem: Problem, traffic: Traffic, length: float) -> tuple[float, float, float]:
    portions = [_alone(problem, jobs) for jobs in traffic.portions]
    exposed = sum(max(0.0, each.free - traffic.delay * length) for each in portions)
    stolen, busy = sum(each.stolen for each in portions), sum(each.busy for each in portions)
    share = 1 / traffic.period
    return length + (exposed + stolen) * share, busy, share


def _alone(problem: Problem, jobs: Sequence[Job]) -> _Step:
    step = _Step(problem)
    for job in jobs:
        step.run(job, 0.0)
    return step


def _whole(seconds: float, length: float) -> float:
    return max(1, math.ceil(seconds / length)) * length if length else seconds


def total(jobs: Sequence[Job]) -> Cost:
    """Returns the cost of all jobs together."""
    cost = Cost()
    for job in jobs:
        cost += job.cost + Cost(sent=job.inside)
    return cost
