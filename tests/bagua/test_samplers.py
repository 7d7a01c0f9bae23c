# The load-balancing samplers: every sample comes, chunks have similar complexity, ranks have equally many batches.

import random

import pytest
import torch
from torch.utils.data import DataLoader

import gossamer as gs
from gossamer.bagua.torch_api.contrib import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

LENGTHS = random.Random(5).choices(range(1, 1000), k=103)
CASES = [(count, replicas) for count in (1, 5, 100, 103) for replicas in (1, 2, 3, 4, 7)]


def samplers(count: int, replicas: int, **options) -> list[LoadBalancingDistributedSampler]:
    data = LENGTHS[:count]
    return [
        LoadBalancingDistributedSampler(data, lambda length: length, replicas, rank, **options)
        for rank in range(replicas)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("count", "replicas"), CASES)
def test_every_sample_comes_and_ranks_have_equally_many(count, replicas, shuffle) -> None:
    ranks = [list(sampler) for sampler in samplers(count, replicas, shuffle=shuffle, random_level=0.3)]
    assert {len(indices) for indices in ranks} == {-(-count // replicas)}
    every = sorted(index for indices in ranks for index in indices)
    assert set(every) == set(range(count))
    largest = -(-len(every) // count)
    assert all(every.count(index) in (largest - 1, largest) for index in range(count))


@pytest.mark.parametrize(("count", "replicas"), [case for case in CASES if case[0] >= case[1]])
def test_drop_last_leaves_the_rest_out_and_repeats_none(count, replicas) -> None:
    every = [index for sampler in samplers(count, replicas, drop_last=True) for index in sampler]
    assert len(every) == len(set(every)) == count // replicas * replicas


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_ranks_get_at_the_same_time_is_neighbours_in_complexity(shuffle) -> None:
    ranks = [list(sampler) for sampler in samplers(100, 4, shuffle=shuffle)]
    order = sorted(LENGTHS[:100])
    chunks = sorted(sorted(LENGTHS[index] for index in chunk) for chunk in zip(*ranks, strict=True))
    assert [length for chunk in chunks for length in chunk] == order
    balanced = sum(max(LENGTHS[i] for i in chunk) for chunk in zip(*ranks, strict=True))
    random.Random(0).shuffle(order)
    assert balanced < 0.7 * sum(max(order[4 * i : 4 * i + 4]) for i in range(25))


def test_noise_grows_with_random_level() -> None:
    spans = []
    for level in (0, 0.2, 1):
        ranks = [list(sampler) for sampler in samplers(100, 4, random_level=level)]
        lengths = [[LENGTHS[index] for index in chunk] for chunk in zip(*ranks, strict=True)]
        spans.append(sum(max(chunk) - min(chunk) for chunk in lengths))
    assert spans[0] < 0.5 * spans[1] < 0.5 * spans[2]


def test_epochs_differ_when_shuffling_and_return_by_number() -> None:
    (sampler,) = samplers(50, 1, seed=3)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert first != second
    assert list(sampler) == first
    (sampler,) = samplers(50, 1, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == first == sorted(range(50), key=LENGTHS.__getitem__)


def test_dropped_samples_change_with_the_epoch() -> None:
    left_out = set()
    for epoch in range(20):
        ranks = samplers(7, 4, drop_last=True)
        for sampler in ranks:
            sampler.set_epoch(epoch)
        left_out |= set(range(7)) - {index for sampler in ranks for index in sampler}
    assert left_out == set(range(7))


def test_place_is_the_launchers_where_none_is_given(monkeypatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    sampler = LoadBalancingDistributedSampler(LENGTHS, lambda length: length)
    assert (sampler.rank, sampler.num_replicas, len(sampler)) == (1, 3, 35)


def batches_below(limit: int):
    """A batch_fn: batches in order, each of a total length below the limit."""

    def split(indices: list[int]) -> list[list[int]]:
        batches, total = [[]], 0
        for index in indices:
            if batches[-1] and total + LENGTHS[index] > limit:
                batches.append([])
                total = 0
            batches[-1].append(index)
            total += LENGTHS[index]
        return batches

    return split


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_ranks_have_equally_many_batches_made_of_their_own_samples(replicas, drop_last) -> None:
    ranks = samplers(100, replicas)
    batched = [LoadBalancingDistributedBatchSampler(one, batches_below(1500), drop_last) for one in ranks]
    for epoch in range(2):
        for one in batched:
            one.set_epoch(epoch)
        own = [batches_below(1500)(list(one)) for one in ranks]
        count = (min if drop_last else max)(len(batches) for batches in own)
        for one, batches in zip(batched, own, strict=True):
            assert len(one) == count
            assert list(one) == [batches[index % len(batches)] for index in range(count)]


def test_data_loader_takes_the_batch_sampler() -> None:
    (sampler,) = samplers(20, 1)
    batched = LoadBalancingDistributedBatchSampler(sampler, batches_below(2000))
    loaded = list(DataLoader(LENGTHS[:20], batch_sampler=batched))
    assert [batch.tolist() for batch in loaded] == [[LENGTHS[index] for index in batch] for batch in batched]
    assert torch.cat(loaded).numel() == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 4, "rank": 4}, "rank must be from 0 to 3, got 4"),
        ({"num_replicas": 2, "rank": -1}, "rank must be from 0 to 1, got -1"),
        ({"num_replicas": 1, "rank": 0, "random_level": 1.5}, "random_level must be from 0 to 1, got 1.5"),
        ({"num_replicas": 200, "rank": 0, "drop_last": True}, "103 samples are too few for 200 ranks"),
        ({"num_replicas": 1, "rank": 0, "dataset": []}, "0 samples are too few for 1 ranks"),
    ],
)
def test_wrong_arguments_are_refused(options, message) -> None:
    with pytest.raises(gs.ConfigError, match=message):
        LoadBalancingDistributedSampler(**{"dataset": LENGTHS, "complexity_fn": int} | options)


def test_wrong_batches_are_refused() -> None:
    with pytest.raises(
        gs.ConfigError, match="batch_fn must give every rank a batch, got \\[(0, 1|1, 0)\\] by rank"
    ):
        LoadBalancingDistributedBatchSampler(
            samplers(10, 2, shuffle=False)[0], lambda indices: [indices] if 3 not in indices else []
        )
    for sampler in (samplers(10, 2, drop_last=True)[0], torch.utils.data.SequentialSampler([1])):
        with pytest.raises(
            gs.ConfigError, match="must be a LoadBalancingDistributedSampler with drop_last=False"
        ):
            LoadBalancingDistributedBatchSampler(sampler, lambda indices: [indices])
