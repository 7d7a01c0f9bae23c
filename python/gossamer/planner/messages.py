# The algorithm itself says what it sends (Algorithm.traffic). Callers: planner/predict.py.
"""Prices what an algorithm sends on a network."""

from functools import lru_cache
from statistics import mean

import torch

from gossamer.algorithms import Algorithm
from gossamer.codec import Codec, CodecSpeed
from gossamer.facts import Cost, Job, PlannedBucket
from gossamer.planner.network import Network, all_ranks
from gossamer.planner.problem import Problem, buckets_of
from gossamer.planner.reduction import Reducer
from gossamer.topology import Topology

# The most rounds and ranks of a topology that are counted. The others are like these.
_ROUNDS, _RANKS = 64, 256
_COUNTERS = 5  # bytes of an agreement in addition to one byte for each parameter


class PricedMessages:
    """gossamer.facts.Messages for one model on one network.

    Args:
        flat: whether sums go in one level, as with gossamer.Flat.
    """

    def __init__(self, problem: Problem, network: Network, algorithm: Algorithm, *, flat: bool) -> None:
        self._problem, self._network, self._speeds = problem, network, problem.speeds
        self._reducer = Reducer(network, problem.speeds, flat=flat)
        self._group = all_ranks(network)
        self.ranks: int = network.ranks
        self.buckets: list[PlannedBucket] = buckets_of(problem, algorithm, self._reducer.chunks)

    def parameter(self, bucket: PlannedBucket) -> tuple[str, torch.Tensor]:
        position = bucket.positions[0]
        return self._problem.names[position], self._problem.parameters[position]

    def mean(self, bucket: PlannedBucket, codec: Codec | None, *, passes: int = 0) -> Job:
        cpu_s = self.pass_s((1 + passes) * bucket.nbytes)  # gathered and scaled
        found = self._reducer.all_reduce(bucket.numel, bucket.dtype, codec)
        return Job(found.cost, cpu_s + found.cpu_s, 0.0, found.beside_s, found.inside)

    def means(self, codec: Codec | None = None) -> list[Job]:
        return [self.mean(bucket, codec).after(bucket.done) for bucket in self.buckets]

    def finite(self) -> list[Job]:
        return [
            Job(self._group.all_reduce(4 * len(bucket.shapes)), self.pass_s(bucket.nbytes) / 2, bucket.done)
            for bucket in self.buckets
        ]

    def sum(self, numel: int) -> Job:
        return self._reducer.all_reduce(numel, torch.float32, None)

    def all_reduce(self, nbytes: int) -> Cost:
        return self._group.all_reduce(nbytes)

    def exchange(self, nbytes: int, topology: Topology) -> tuple[Cost, float]:
        messages, crossing = messages_of(topology, self._network)
        return self._group.exchange(nbytes, messages=messages, crossing=crossing), messages

    def speed_of(self, codec: Codec) -> CodecSpeed:
        return self._speeds.of(codec)

    def pass_s(self, nbytes: float) -> float:
        return nbytes / self._speeds.memory

    def product_s(self, operations: float) -> float:
        return operations / self._speeds.flops

    def agreement(self) -> Cost:
        """The ranks' agreement at the end of a backward."""
        return self._group.all_reduce(_COUNTERS + len(self._problem.parameters))


@lru_cache(maxsize=1024)
def messages_of(topology: Topology, network: Network) -> tuple[float, float]:
    """Returns the mean number in a round of messages that a rank sends, and of those that leave the fullest host."""
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
