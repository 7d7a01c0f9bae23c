# The plan of buckets is the engine's, without padding. Callers: planner/predict.py.
"""The traffic of torch's own DistributedDataParallel, with and without its communication hooks, for comparison."""

import torch

from gossamer.algorithms.powersgd import thin_factors
from gossamer.errors import ConfigError
from gossamer.facts import Cost, Job, PlannedBucket, Traffic
from gossamer.planner.methods import Stock
from gossamer.planner.network import Network, RankGroup, all_ranks
from gossamer.planner.problem import Problem, buckets_of
from gossamer.planner.reduction import Reducer


def stock_traffic(problem: Problem, network: Network, stock: Stock) -> Traffic:
    """Returns the traffic of a step. ConfigError for a hook that is not known."""
    group, speeds = all_ranks(network), problem.speeds
    buckets = buckets_of(problem)
    if stock.hook is None:
        jobs = [_sum(group, b, stock, problem) for b in buckets]
    elif stock.hook == "fp16":
        jobs = [_all_reduce(group, b, 2 * b.numel, problem) for b in buckets]
    elif stock.hook == "powersgd":
        jobs = [_powersgd(group, bucket, stock, problem) for bucket in buckets]
    elif stock.hook == "post_local_sgd":
        # The hook averages inside a host, and the averager sends all parameters at once.
        host = RankGroup(network, network.per_host, network.per_host)
        local = [_all_reduce(host, b, b.nbytes, problem) for b in buckets]
        nbytes = sum(bucket.nbytes for bucket in buckets)
        after = Job(group.all_reduce(nbytes), 4 * nbytes / speeds.memory)
        return Traffic(in_backward=local, after=[after], period=stock.period, lockstep=False)
    else:
        raise ConfigError(
            f"Stock: hook must be None, 'fp16', 'powersgd' or 'post_local_sgd', got {stock.hook!r}"
        )
    return Traffic(in_backward=jobs, lockstep=False)


def _sum(group: RankGroup, bucket: PlannedBucket, stock: Stock, problem: Problem) -> Job:
    codec = stock.options.codec if bucket.nbytes >= stock.options.min_bytes else None
    if codec is None or group.size == 1:
        return _all_reduce(group, bucket, bucket.nbytes, problem)
    copies = Job(Cost(), 2 * bucket.nbytes / problem.speeds.memory)  # into the bucket and back
    reducer = Reducer(group.network, problem.speeds)
    return (copies + reducer.all_reduce(bucket.numel, bucket.dtype, codec)).after(bucket.done)


def _all_reduce(group: RankGroup, bucket: PlannedBucket, nbytes: int, problem: Problem) -> Job:
    passes = 2 if group.size > 1 else 1  # over the bucket's memory: copy and divide, then sum
    if nbytes != bucket.nbytes:
        passes += 2
    return Job(group.all_reduce(nbytes), passes * bucket.nbytes / problem.speeds.memory, bucket.done)


def _powersgd(group: RankGroup, bucket: PlannedBucket, stock: Stock, problem: Problem) -> Job:
    """Prices three all-reduces: what is not compressed, the left factors, and the right factors."""
    plain, left, right, products = thin_factors(bucket, stock.rank, lambda whole, thin: 2 * thin < whole)
    cost = Cost()
    for count in (plain, left, right):
        cost += group.all_reduce(torch.float32.itemsize * count) if count else Cost()
    passes_s = 6 * bucket.nbytes / problem.speeds.memory
    return Job(cost, 4 * 2 * products / problem.speeds.flops + passes_s, bucket.done)
