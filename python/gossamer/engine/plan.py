"""Which parameters travel together: parameters to buckets. A pure function of its arguments.

No memory and no hooks here; engine.py turns the plan into native buckets.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import chain, repeat

from torch import Tensor


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
    """Groups the parameters named by `order` into buckets, in the order in which they will be complete.

    A bucket holds one dtype on one device and one group, and closes once it holds `bucket_bytes` (the first one
    `first_bucket_bytes`, so that communication starts early). Buckets are sorted by their last parameter.
    Several `first_bucket_bytes` are those of as many buckets.

    Args:
        params: all parameters of the model.
        last: indices whose buckets go after all others, and hold no others.
        group_of: the group of a parameter, by its index.
        limit_of: see Algorithm.bucket_limit; lowers `bucket_bytes`, and a single `first_bucket_bytes` with it.
        order: indices into `params`, in the order in which gradients are expected.

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
