"""Which parameters share a bucket."""

import pytest
import torch

from gossamer.engine import plan_buckets


def sizes(bytes_of_each: list[int], firsts, bucket_bytes: int) -> list[int]:
    """Bytes of each bucket; the parameters arrive in their order."""
    params = [torch.empty(size, dtype=torch.uint8) for size in bytes_of_each]
    plan = plan_buckets(params, range(len(params)), bucket_bytes=bucket_bytes, first_bucket_bytes=firsts)
    assert [index for bucket in plan for index in bucket] == list(range(len(params)))
    return [sum(params[index].numel() for index in bucket) for bucket in plan]


@pytest.mark.parametrize(
    ("firsts", "bucket_bytes", "expected"),
    [
        (10, 60, [10, 20, 40, 60, 60, 10]),  # doubled until the next would hold more than a bucket
        (60, 60, [60, 60, 60, 20]),
        (100, 60, [60, 60, 60, 20]),  # a first one is never larger than the others
        ((10,), 60, [10, 60, 60, 60, 10]),  # as torch's: those named, and then full ones
        ((10, 30), 60, [10, 30, 60, 60, 40]),
    ],
)
def test_buckets_grow_from_the_first_size_to_the_full_one(firsts, bucket_bytes, expected) -> None:
    assert sizes([10] * 20, firsts, bucket_bytes) == expected


def test_a_bucket_is_larger_than_its_limit_by_its_last_parameter() -> None:
    assert sizes([15, 100, 5, 5, 5, 200], 10, 40) == [15, 100, 215]
