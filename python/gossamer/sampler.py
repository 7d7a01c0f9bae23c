"""``ElasticSampler`` knows which part of an epoch is processed, and divides the rest among any number of workers.

It communicates nothing. gs.elastic() and the Horovod face's TorchState synchronise its state.
"""

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from gossamer import runtime


class ElasticSampler(Sampler[int]):
    """Divides what is left of a dataset among the workers.

    All workers get equally many indices; where that needs more than are left, some are drawn twice. Only workers that
    average by their clocks under gs.elastic() get as many as fit their speed.

    gs.elastic() calls the other methods. With hvd.elastic, call set_epoch() at the end of an epoch and record_batch()
    after each batch, and make the sampler an attribute of the TorchState.

    Args:
        dataset: only its length is used.
        shuffle: whether to draw a new order for each epoch, the same on all workers.
        seed: the seed of these orders.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch: int = 0
        self._divided: tuple[int, int] | None = None
        self._left: list[int] | None = None  # see share_out()
        self._ordered: tuple[tuple[int, ...], list[int]] = (), []  # the last order(), and what it is made of
        self.processed_num: int = 0  # samples of this epoch, by all workers
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch with nothing processed."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every worker has processed a batch of ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Sized) -> None:
        """Records that every worker has processed as many samples as there are indices."""
        self.processed_num += len(indices) * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Returns the indices of this worker's batch number ``batch_idx`` since the last reset."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Returns epoch and processed_num, and after share_out() the indices that were left then."""
        state = {"epoch": self.epoch, "processed_num": self.processed_num}
        return state if self._left is None else state | {"left": list(self._left)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets epoch and processed_num, and divides what is left."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self._left = state_dict.get("left")
        self.reset()

    def place(self) -> tuple[int, int]:
        """Returns this worker's rank, and the number of workers."""
        return self._divided or (runtime.rank(), runtime.size())

    def divide(self, rank: int, size: int) -> None:
        """Divides what is left among `size` workers, of whom this is number `rank`, until the next call."""
        self._divided = rank, size
        self.reset()

    def order(self, epoch: int) -> list[int]:
        """Returns all indices, as they are drawn in an epoch."""
        made_of = epoch, self.seed, int(self.shuffle), len(self.dataset)
        if self._ordered[0] != made_of:  # a million indices take a second
            order = list(range(len(self.dataset)))
            if self.shuffle:
                random.Random(self.seed + epoch).shuffle(order)
            self._ordered = made_of, order
        return list(self._ordered[1])

    def reset(self) -> None:
        """Divides what is left of the epoch among the current workers."""
        self.rank: int
        self.num_replicas: int
        self.rank, self.num_replicas = self.place()
        # Workers take turns, so equally many batches of all workers process the beginning of the order.
        order, begin = self.order(self.epoch), self.processed_num
        if self._left is not None:
            order, begin = self._left, begin - self._processed_before(self._left)
        self.remaining_indices: list[int] = order[begin:]
        self.num_samples: int = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size: int = self.num_samples * self.num_replicas
        padded = list(self.remaining_indices)
        while 0 < len(padded) < self.total_size:
            padded += self.remaining_indices[: self.total_size - len(padded)]
        self.indices: list[int] = padded[self.rank :: self.num_replicas]

    def share_out(self, epoch: int, left: list[int], *, begin: int, end: int) -> None:
        """Sets what is left of an epoch, in drawing order, and which part of it is this worker's, until reset()."""
        self.epoch, self._left = epoch, left
        self.processed_num = self._processed_before(left)
        self.rank, self.num_replicas = self.place()
        self.remaining_indices, self.indices = left, left[begin:end]
        self.num_samples = self.total_size = len(self.indices)

    def _processed_before(self, left: list[int]) -> int:
        return max(0, len(self.dataset) - len(left))  # what an epoch has left to this one comes on top

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
