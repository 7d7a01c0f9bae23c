# What an algorithm sends and computes in a step, bucket by bucket: the messages of python/gossamer/algorithms and of
# csrc/collectives, priced by planner/network.py and planner/speeds.py. When it happens is said here, how long all of it
# takes together is schedule.py's. Callers: planner/predict.py.
"""Jobs of the communication worker, for each algorithm."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import mean

import torch

from gossamer.algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
    ZeroOneAdam,
)
from gossamer.algorithms.local_sgd import deal
from gossamer.algorithms.qadam import AdamAlgorithm
from gossamer.codec import Codec, Identity
from gossamer.errors import ConfigError
from gossamer.planner.network import Cost, Network, all_ranks
from gossamer.planner.problem import PlannedBucket, Problem, buckets_of
from gossamer.planner.reduction import Reducer
from gossamer.topology import Topology

_ROUNDS, _RANKS = 64, 256  # of a topology that are looked at; a longer schedule's others are like these
_ZERO_ONE_PASSES = 10  # of 0/1 Adam over its updates, its variance, anchor and weights, when it synchronises
_COUNTERS = 5  # bytes of an agreement beside one for each parameter


@dataclass(frozen=True)
class Job:
    """One task of the worker: `cpu_s` of its own, then `cost` on the network. `done`: of the backward, before it.

    Args:
        beside_s: of computing while the network is at work, in pieces.
        inside: bytes that a rank hands to others of its host beside those of `cost`, in `cpu_s` and `beside_s`.
    """

    cost: Cost
    cpu_s: float = 0.0
    done: float = 0.0
    beside_s: float = 0.0
    inside: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """Of one step.

    Args:
        from_start: jobs that may begin with the forward and must end before the optimizer steps.
        in_backward: jobs that begin when their bucket is ready, and must end before the optimizer steps.
        after: jobs while which the rank does nothing else; of a synchronisation, in every `period` steps.
        portions: or lists of jobs, each in the background for `delay` steps of a period, which then wait for it.
        pause_s: None, or `after` is repeated in the background for ever, with this pause.
        agreement: beside the last bucket.
    """

    from_start: Sequence[Job] = ()
    in_backward: Sequence[Job] = ()
    after: Sequence[Job] = ()
    portions: Sequence[Sequence[Job]] = ()
    period: int = 1
    delay: int = 0
    pause_s: float | None = None
    agreement: Cost = field(default_factory=Cost)


def traffic_of(
    problem: Problem, network: Network, algorithm: Algorithm, *, warm: bool = True, flat: bool = False
) -> Traffic:
    """Args: warm: after the warm-up, if the algorithm has one; flat: through gossamer.Flat, in one level.

    Raises:
        ConfigError: an algorithm that is not known here.
    """
    planner = _Traffic(problem, network, algorithm, flat)
    for kind, make in _KINDS.items():
        if isinstance(algorithm, kind):
            return make(planner, algorithm) if warm else planner.averaged_gradients()
    raise ConfigError(f"traffic_of: algorithm must be one of gossamer.algorithms, got {algorithm!r}")


class _Traffic:
    def __init__(self, problem: Problem, network: Network, algorithm: Algorithm, flat: bool) -> None:
        self.problem, self.network, self.speeds = problem, network, problem.speeds
        self.reducer = Reducer(network, problem.speeds, flat=flat)
        self.group = all_ranks(network)
        self.buckets = buckets_of(problem, algorithm, self.reducer.chunks)
        lockstep = (
            getattr(algorithm, "lockstep", True) if not isinstance(algorithm, AsyncModelAverage) else False
        )
        parameters = _COUNTERS + len(problem.parameters)
        self.agreement = self.group.all_reduce(parameters) if lockstep else Cost()

    # --- the algorithms ---

    def gradient_allreduce(self, algorithm: GradientAllReduce) -> Traffic:
        from_adaptive = [self._codec_of(algorithm, bucket) for bucket in self.buckets]
        jobs = [
            self.mean(b, codec, done=b.done) for b, codec in zip(self.buckets, from_adaptive, strict=True)
        ]
        return Traffic(in_backward=jobs, agreement=self.agreement)

    def averaged_gradients(self) -> Traffic:
        """What has a warm-up does this in it."""
        jobs = [self.mean(bucket, None, done=bucket.done) for bucket in self.buckets]
        return Traffic(
            in_backward=jobs, agreement=self.group.all_reduce(_COUNTERS + len(self.problem.parameters))
        )

    def adam(self, algorithm: AdamAlgorithm) -> Traffic:
        passes = _ZERO_ONE_PASSES if isinstance(algorithm, ZeroOneAdam) else 0
        jobs = [self.mean(bucket, algorithm.codec, passes=passes) for bucket in self.buckets]
        return Traffic(in_backward=self._finite(), after=jobs, agreement=self.agreement)

    def powersgd(self, algorithm: PowerSGD) -> Traffic:
        return Traffic(
            in_backward=[self._factors(bucket, algorithm) for bucket in self.buckets],
            agreement=self.agreement,
        )

    def decentralized(self, algorithm: Decentralized) -> Traffic:
        jobs = [self._with_peers(bucket, algorithm.topology) for bucket in self.buckets]
        share = 1 / algorithm.interval
        scaled = [Job(job.cost.times(share), job.cpu_s * share) for job in jobs]
        return Traffic(from_start=scaled, in_backward=self._finite(), agreement=self.agreement)

    def low_precision(self, algorithm: LowPrecisionDecentralized) -> Traffic:
        jobs = [self._differences(bucket, algorithm) for bucket in self.buckets]
        return Traffic(
            in_backward=self._finite(), after=jobs, period=algorithm.interval, agreement=self.agreement
        )

    def local_sgd(self, algorithm: LocalSGD) -> Traffic:
        jobs = [self.mean(bucket, algorithm.codec or Identity(), passes=3) for bucket in self.buckets]
        dealt = deal([bucket.numel for bucket in self.buckets], algorithm.fragments)
        delayed = algorithm.delay > 0
        return Traffic(
            in_backward=self._finite() if algorithm.lockstep else (),
            after=() if delayed else jobs,
            portions=[[jobs[index] for index in own] for own in dealt] if delayed else (),
            period=algorithm.period,
            delay=algorithm.delay,
            agreement=self.agreement,
        )

    def asynchronous(self, algorithm: AsyncModelAverage) -> Traffic:
        count = self.group.all_reduce(8)
        jobs = [self.mean(bucket, Identity(), passes=4) for bucket in self.buckets]  # copied twice, taken in
        return Traffic(after=[Job(count), *jobs], pause_s=algorithm.sync_interval_ms / 1000)

    # --- their parts ---

    def mean(self, bucket: PlannedBucket, codec: Codec | None, *, done: float = 0.0, passes: int = 0) -> Job:
        """all_reduce of gossamer.collectives; `passes` over the bucket beside it."""
        cpu_s = (1 + passes) * bucket.nbytes / self.speeds.memory  # gathered and scaled
        found = self.reducer.all_reduce(bucket.numel, bucket.dtype, codec)
        return Job(found.cost, cpu_s + found.cpu_s, done, found.beside_s, found.inside)

    def _codec_of(self, algorithm: GradientAllReduce, bucket: PlannedBucket) -> Codec | None:
        position = bucket.positions[0]
        choice = algorithm.group_of(self.problem.names[position], self.problem.parameters[position])
        assert choice is None or isinstance(choice, Codec)
        return choice

    def _finite(self) -> list[Job]:
        """gossamer.engine.agree_on_finite, for what does not send gradients."""
        cost = self.group.all_reduce(4)
        return [Job(cost, bucket.nbytes / self.speeds.memory / 2, bucket.done) for bucket in self.buckets]

    def _factors(self, bucket: PlannedBucket, algorithm: PowerSGD) -> Job:
        plain, left, right, products = thin_factors(
            bucket, algorithm.rank, lambda whole, thin: whole >= algorithm.min_compression_rate * thin > 0
        )
        left += plain
        cpu_s = 4 * 2 * products / self.speeds.flops + 3 * bucket.nbytes / self.speeds.memory
        job = Job(Cost(), cpu_s, bucket.done)
        for count in (left, right):
            if count:
                found = self.reducer.all_reduce(count, torch.float32, None)
                job = Job(
                    job.cost + found.cost,
                    job.cpu_s + found.cpu_s,
                    job.done,
                    job.beside_s + found.beside_s,
                    job.inside + found.inside,
                )
        return job

    def _with_peers(self, bucket: PlannedBucket, topology: Topology) -> Job:
        passes_s = bucket.nbytes / self.speeds.memory
        if topology.uniform:
            return Job(self.group.all_reduce(bucket.nbytes), 4 * passes_s)
        messages, crossing = messages_of(topology, self.network)
        cost = self.group.exchange(bucket.nbytes, messages=messages, crossing=crossing)
        return Job(cost, (4 + messages) * passes_s)

    def _differences(self, bucket: PlannedBucket, algorithm: LowPrecisionDecentralized) -> Job:
        messages, crossing = messages_of(algorithm.topology, self.network)
        wire = algorithm.codec.wire_bytes(bucket.numel, bucket.dtype)
        speed = self.speeds.of(algorithm.codec)
        cpu_s = 4 * bucket.numel * (1 / speed.encode + (1 + messages) / speed.decode)
        cpu_s += (3 + 3 * messages) * bucket.nbytes / self.speeds.memory
        cost = self.group.exchange(wire, messages=messages, crossing=crossing)
        return Job(cost, cpu_s)


_KINDS: dict[type[Algorithm], Callable[..., Traffic]] = {
    GradientAllReduce: _Traffic.gradient_allreduce,
    AdamAlgorithm: _Traffic.adam,
    PowerSGD: _Traffic.powersgd,
    Decentralized: _Traffic.decentralized,
    LowPrecisionDecentralized: _Traffic.low_precision,
    LocalSGD: _Traffic.local_sgd,
    AsyncModelAverage: _Traffic.asynchronous,
}


@lru_cache(maxsize=4096)
def thin_factors(
    bucket: PlannedBucket, rank: int, pays: Callable[[int, int], bool]
) -> tuple[int, int, int, int]:
    """Elements that go whole, of left and of right factors, and multiplications of one product, of PowerSGD.

    Args:
        pays: whether a matrix of so many elements is worth factors of so many.
    """
    plain = left = right = products = 0
    for shape in bucket.shapes:
        rows, columns = (shape[0] if shape else 1), math.prod(shape[1:])
        thin = min(rank, rows, columns)
        if len(shape) > 1 and pays(rows * columns, thin * (rows + columns)):
            left += thin * rows
            right += thin * columns
            products += thin * rows * columns
        else:
            plain += rows * columns
    return plain, left, right, products


@lru_cache(maxsize=1024)
def messages_of(topology: Topology, network: Network) -> tuple[float, float]:
    """Means over the rounds: messages that a rank sends, and those that leave the fullest host."""
    size = network.ranks
    rounds = range(min(topology.period(size), _ROUNDS))
    looked_at = network.host_ranks[: max(1, _RANKS // network.per_host)]
    sent, crossing = [], []
    for round_ in rounds:
        outside = []
        for host in looked_at:
            exchanges = [topology.mixing(round_, size, rank).exchanges for rank in host]
            peers = [e.to for own in exchanges for e in own]
            sent.append(len(peers) / len(host))
            outside.append(sum(peer not in host for peer in peers))
        crossing.append(max(outside))
    return mean(sent), mean(crossing)
