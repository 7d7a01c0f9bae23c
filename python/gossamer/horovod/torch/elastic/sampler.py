# A sampler that knows which part of an epoch has been processed, so that the rest can be divided anew among another
# number of workers. Communicates nothing: its state is synchronised by state.py.
"""Sampling in elastic training."""

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from gossamer.horovod.torch.mpi_ops import rank, size


class ElasticSampler(Sampler[int]):
    """Divides what is left of a dataset among the workers.

    All workers get equally many indices; the last ones are drawn twice where that needs it. Call set_epoch at the end
    of an epoch, record_batch after each batch, and make it an attribute of the TorchState.

    Args:
        dataset: its length counts.
        shuffle: whether the order is drawn anew for each epoch, equally on all workers.
        seed: of that.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # of this epoch, by all workers
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch with nothing processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This worker and all others have processed a batch of ``batch_size`` samples each."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Sized) -> None:
        """The same of as many samples as there are indices."""
        self.processed_num += len(indices) * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The indices of this worker's batch number ``batch_idx`` since the last reset."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """epoch and processed_num."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes epoch and processed_num over, and divides what is left."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides what is left of the epoch among the workers that there are now."""
        self.rank, self.num_replicas = rank(), size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        # Workers take turns, so after equally many batches the first ones of the order are done.
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        padded = list(self.remaining_indices)
        while 0 < len(padded) < self.total_size:
            padded += self.remaining_indices[: self.total_size - len(padded)]
        self.indices = padded[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
