"""Decides which parameters travel together. A pure function: buckets.py turns its plan into native buckets."""

from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from torch import Tensor


class Sizes(NamedTuple):
    """How large buckets are: see plan_buckets. `last` holds names of parameters."""

    bucket_bytes: int
    first_bucket_bytes: int | Sequence[int]
    last: Collection[str] = ()


def plan_buckets(
    params: Sequence[Tensor],
    order: Sequence[int],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int | Sequence[int],
    last: Collection[int] = (),
    group_of: Callable[[int], Hashable] = lambda index: None,
    limit_of: Callable[[int], int | None] = lambda model_bytes: None,
) -> list[list[int]]:
    """Group parameters into buckets, in the order in which the buckets will be complete.

    A bucket holds parameters of one dtype, one device and one group. It closes when it holds `bucket_bytes`; the first
    one closes at `first_bucket_bytes`, so that communication starts early. Buckets are sorted by their last parameter.

    Args:
        params: all parameters of the model.
        order: indices into `params`, in the order in which gradients are expected.
        bucket_bytes: the size at which a bucket closes.
        first_bucket_bytes: the same for the first bucket; a sequence: for each of the first buckets.
        last: indices of parameters that travel after all others, in buckets of their own.
        group_of: returns the group of a parameter, by its index.
        limit_of: see Algorithm.bucket_limit. It lowers `bucket_bytes`, and a single `first_bucket_bytes` with it.

    Returns:
        Lists of indices into `params`.
    """
    bucket_bytes = min(bucket_bytes, limit_of(sum(param.nbytes for param in params)) or bucket_bytes)
    firsts = first_bucket_bytes
    if isinstance(firsts, int):
        firsts = [min(firsts, bucket_bytes)]  # a tuner changes the other
    limits = chain(firsts, repeat(bucket_bytes))
    limit = next(limits)
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    for index in order:
        param = params[index]
        key = (param.dtype, param.device, group_of(index), index in last)
        open_buckets.setdefault(key, []).append(index)
        open_bytes[key] = open_bytes.get(key, 0) + param.nbytes
        if open_bytes[key] >= limit:
            closed.append(open_buckets.pop(key))
            del open_bytes[key]
            limit = next(limits)
    position = {index: (index in last, place) for place, index in enumerate(order)}
    return sorted(closed + list(open_buckets.values()), key=lambda bucket: position[bucket[-1]])
