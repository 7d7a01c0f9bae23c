"""Samplers that give all ranks samples of similar complexity at the same time, so that no rank waits for another.

The samples are sorted by complexity, and cut into chunks with one sample for each rank.
"""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import Sampler

from gossamer.bagua.torch_api import env
from gossamer.errors import ConfigError


class LoadBalancingDistributedSampler(Sampler[int]):
    """Splits a dataset between ranks by the complexity of its samples.

    Args:
        dataset: a map-style dataset. Every sample of it is read once, here.
        complexity_fn: returns the complexity of a sample, a number.
        num_replicas, rank: the number of ranks, and this rank. None: the group's or the launcher's.
        shuffle: take another order in each epoch. Call set_epoch() before each.
        seed: the seed of the orders, equal on all ranks.
        drop_last: leave samples out if their number is not divisible by the ranks; else some samples come twice. With
            shuffle they are drawn in each epoch; otherwise they are the last (or first) of the dataset.
        random_level: 0 sorts exactly. With shuffle, 1 adds noise as large as the range of complexities.

    Raises:
        ConfigError: the dataset is empty, has fewer samples than ranks with drop_last, or a rank or level is out of
            its range.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[..., float],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        self.dataset = dataset
        self.shuffle: bool = shuffle
        self.seed: int = seed
        self.drop_last: bool = drop_last
        self.num_replicas: int = env.get_world_size() if num_replicas is None else num_replicas
        self.rank: int = env.get_rank() if rank is None else rank
        self.epoch: int = 0
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(
                f"LoadBalancingDistributedSampler: rank must be from 0 to {self.num_replicas - 1}, got {self.rank}."
            )
        if not 0 <= random_level <= 1:
            raise ConfigError(
                f"LoadBalancingDistributedSampler: random_level must be from 0 to 1, got {random_level}."
            )
        count = len(dataset)
        self.num_samples: int = count // self.num_replicas if drop_last else -(-count // self.num_replicas)
        self.total_size: int = self.num_samples * self.num_replicas
        if self.num_samples == 0:
            raise ConfigError(
                f"LoadBalancingDistributedSampler: {count} samples are too few for {self.num_replicas} ranks "
                f"(drop_last={drop_last})."
            )
        self.complexities: list[float] = [complexity_fn(dataset[index]) for index in range(count)]
        self.random_number: int = int((max(self.complexities) - min(self.complexities)) * random_level + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices_of(self.rank))

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration, when shuffling. All ranks give the same."""
        self.epoch = epoch

    def indices_of(self, rank: int) -> list[int]:
        """The `num_samples` samples of a rank in this epoch, in order. Every rank can compute those of all ranks."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        count = len(self.complexities)
        order = torch.randperm(count, generator=generator).tolist() if self.shuffle else list(range(count))
        # Some samples are left out, or some come twice, before sorting, so that it gives only full chunks.
        whole, rest = divmod(self.total_size, count)
        indices, chunks = order * whole + order[:rest], list(range(self.num_samples))
        noise = [0] * len(indices)
        if self.shuffle:
            noise = torch.randint(self.random_number, (len(indices),), generator=generator).tolist()
            chunks = torch.randperm(self.num_samples, generator=generator).tolist()
        noisy = zip(indices, noise, strict=True)
        by_complexity = sorted(noisy, key=lambda one: self.complexities[one[0]] + one[1])
        return [by_complexity[chunk * self.num_replicas + rank][0] for chunk in chunks]


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of different sizes, for example of similar total complexity. Every rank gets equally many batches.

    Args:
        sampler: its order is cut into batches; made with drop_last=False.
        batch_fn: one rank's indices -> a list of batches, each a list of indices; equal on all ranks.
        drop_last: all ranks stop with the one that has fewest batches; else the others repeat their first ones.

    Raises:
        ConfigError: another sampler; or batch_fn gave a rank no batch.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler) or sampler.drop_last:
            raise ConfigError(
                "LoadBalancingDistributedBatchSampler: sampler must be a LoadBalancingDistributedSampler with "
                f"drop_last=False, got {sampler!r} with {getattr(sampler, 'drop_last', None)}."
            )
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last: bool = drop_last
        self._generate()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.padded_batches)

    def __len__(self) -> int:
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        """Calls the sampler's set_epoch(), and makes the batches of that epoch."""
        self.sampler.set_epoch(epoch)
        self._generate()

    def _generate(self) -> None:
        every = [self.batch_fn(self.sampler.indices_of(rank)) for rank in range(self.sampler.num_replicas)]
        counts = [len(batches) for batches in every]
        if min(counts) == 0:
            raise ConfigError(
                f"LoadBalancingDistributedBatchSampler: batch_fn must give every rank a batch, got {counts} by rank."
            )
        self.total_batch: int = min(counts) if self.drop_last else max(counts)
        self.padded_batches: list[list[int]] = list(islice(cycle(every[self.sampler.rank]), self.total_batch))
