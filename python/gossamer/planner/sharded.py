# A module that is sharded by itself is here a unit: FSDP gathers, scatters and sums its parameters together. Callers:
# planner/predict.py.
"""The traffic of torch's own FSDP2 and of hybrid sharding (HSDP), with codecs in their groups and without."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gossamer.codec import Codec
from gossamer.facts import Cost, Job, Traffic
from gossamer.planner.methods import Sharded
from gossamer.planner.network import Network, RankGroup, all_ranks
from gossamer.planner.problem import Problem
from gossamer.planner.reduction import Reducer
from gossamer.process_group import Options


@dataclass(frozen=True)
class _Unit:
    numel: int  # of all ranks' shards, with their padding
    shard: int
    dtype: torch.dtype
    begun: float  # the share of the backward before it
    done: float  # the share after which all of its gradients are there
    root: bool


def sharded_traffic(problem: Problem, network: Network, program: Sharded) -> Traffic:
    """Returns the traffic of a step.

    On CPUs FSDP waits for each of its collectives, so their times add to the step. On GPUs they run beside forward and
    backward.
    """
    shards, replicas = _axes(network, program)
    price = _Prices(Reducer(network, problem.speeds, flat=True))
    forward: list[Job] = []
    backward: list[Job] = []
    for unit in _units(problem, shards.size):
        gathering = price.gather(shards, unit, program)
        forward.insert(0, gathering)
        # The root stays gathered between forward and backward. Differences are kept.
        if not unit.root and program.weights is None:
            backward.append(gathering.after(unit.begun))
        summing = price.scatter(shards, unit, program.options) + price.mean(replicas, unit, program.between)
        backward.append(summing.after(unit.done))
    if problem.speeds.device == "cpu":
        return Traffic(after=[*forward, *backward], lockstep=False)
    return Traffic(from_start=forward, in_backward=sorted(backward, key=lambda job: job.done), lockstep=False)


def _axes(network: Network, program: Sharded) -> tuple[RankGroup, RankGroup]:
    """Returns the groups of the shards and of the replicas. Hosts of unlike size have several groups of shards each."""
    if not program.hybrid:
        return all_ranks(network), RankGroup(network, 1, 1)
    size = math.gcd(*(len(ranks) for ranks in network.host_ranks))
    between = RankGroup(network, network.ranks // size, network.per_host // size, sharing=size)
    return RankGroup(network, size, size), between


def _units(problem: Problem, shards: int) -> Iterator[_Unit]:
    """Yields units in the order of the backward: each block of a list of layers by itself, the rest as the root."""
    of_unit: dict[str, list[int]] = {}
    for index, name in enumerate(problem.names):
        block = re.match(r"(.*?\b\d+)\.", name)
        of_unit.setdefault(block[1] if block else "", []).append(index)
    root = of_unit.pop("", [])
    seen = 0
    for indices, is_root in [*((each, False) for each in reversed(of_unit.values())), (root, True)]:
        if not indices:
            continue
        params = [problem.parameters[index] for index in indices]
        begun, seen = seen, seen + sum(param.numel() for param in params)
        # Each parameter is divided along its first dimension.
        rows = [
            (-(-param.shape[0] // shards), param.shape[1:]) if param.dim() else (1, ()) for param in params
        ]
        shard = sum(count * math.prod(rest) for count, rest in rows)
        yield _Unit(
            shard * shards, shard, params[0].dtype, begun / problem.numel, seen / problem.numel, is_root
        )


class _Prices:
    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.memory: float = reducer.speeds.memory

    def gather(self, group: RankGroup, unit: _Unit, program: Sharded) -> Job:
        nbytes = unit.numel * unit.dtype.itemsize
        if program.weights is not None:
            job = self.reducer.gather(group, unit.shard, unit.dtype, program.weights.codec)
            return self._with_passes(
                job, 3, nbytes
            )  # added to the copy, which is copied, and into the parameters
        codec = _codec(program.options.gather_codec, nbytes, program.options)
        job = self.reducer.gather(group, unit.shard, unit.dtype, codec)
        return self._with_passes(job, 1, nbytes)  # into the parameters

    def scatter(self, group: RankGroup, unit: _Unit, options: Options) -> Job:
        nbytes = unit.numel * unit.dtype.itemsize
        job = self.reducer.scatter(group, unit.shard, unit.dtype, _codec(options.codec, nbytes, options))
        return self._with_passes(job, 1, nbytes)  # out of the gradients

    def mean(self, group: RankGroup, unit: _Unit, options: Options) -> Job:
        nbytes = unit.shard * unit.dtype.itemsize
        codec = _codec(options.codec, nbytes, options)
        if codec is not None:
            return self.reducer.in_one_level(group, unit.shard, unit.dtype, codec)
        return self._with_passes(Job(group.all_reduce(nbytes)), 1 if group.size > 1 else 0, nbytes)

    def _with_passes(self, job: Job, passes: int, nbytes: int) -> Job:
        return Job(Cost(), passes * nbytes / self.memory) + job


def _codec(codec: Codec | None, nbytes: int, options: Options) -> Codec | None:
    return codec if nbytes >= options.min_bytes else None
