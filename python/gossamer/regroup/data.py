"""How the workers of gs.elastic() divide the data of an epoch.

Where all workers make equally many steps, each knows what the others have drawn, and equal parts last until the group
changes. Where slow workers make fewer steps, each has a part that fits its speed. Once one of them has drawn all of its
part, they divide what is left anew, and so does the next group after a death.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from gossamer import runtime
from gossamer.comm import Communicator, gather_numbers
from gossamer.engine import broadcast_state
from gossamer.sampler import ElasticSampler

_NOWHERE = -1  # the place of a worker that has no part


class Data(ABC):
    """The parts of one sampler's data."""

    #: Whether this worker has drawn all of its part, and waits for another one.
    is_dry: bool = False
    #: Whether workers make different numbers of steps.
    uneven: bool = False
    #: The number of the last epoch, as far as it is known.
    last_epoch: int = 0

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    @abstractmethod
    def begin(self) -> None:
        """Divide for the first time. All workers have equal samplers."""

    @abstractmethod
    def divide(self, control: Communicator) -> None:
        """Divide what is left among the members of the present group. Collective over those that have drawn."""

    def welcome(self, control: Communicator, *, divides: bool) -> None:
        """Called before newcomers take the state: divide(), or leave it to the next division. Collective alike."""
        self.divide(control)

    @abstractmethod
    def drew(self, batch: int, samples: int) -> None:
        """Note that this worker has trained on a batch, the `batch`-th of its part."""

    def next_epoch(self, epoch: int) -> None:
        """Begin an epoch, if the division has not done so."""
        self._sampler.set_epoch(epoch)

    def is_beyond(self, epoch: int) -> bool:
        """Return whether the division has ended this epoch."""
        return False

    def numbers(self) -> list[int]:
        """Return what the others need to know of this worker in an averaging."""
        return []

    def heard(self, numbers: Sequence[Sequence[int]]) -> None:
        """Take the numbers() of all ranks in an averaging."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a newcomer needs."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of another worker of this group."""
        self._sampler.load_state_dict(state)


class EvenData(Data):
    """Equal parts, for workers that step together or equally often."""

    def begin(self) -> None:
        """See Data."""
        self._sampler.divide(runtime.rank(), runtime.size())

    def divide(self, control: Communicator) -> None:
        """See Data."""
        self.begin()

    def drew(self, batch: int, samples: int) -> None:
        """See Data."""
        self._sampler.record_batch(batch, samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Data."""
        super().load_state_dict(state)
        self.begin()


class UnevenData(Data):
    """Parts that fit the speeds of the workers. A part is one range of what is left, in drawing order.

    What a dead worker has drawn since the last averaging is in no mean, so others draw it again. What makes less than a
    batch a worker is left to the next epoch, if there is one.

    Args:
        sampler: the loader's.
        batch_size: of the loader, in samples.
        drop_last: whether the loader drops what makes less than a batch.
    """

    uneven = True

    def __init__(self, sampler: ElasticSampler, batch_size: int, *, drop_last: bool) -> None:
        super().__init__(sampler)
        self._batch, self._drop_last = batch_size, drop_last
        self._number = 0  # of the present division; 0: there is none
        self._place = 0  # whose part this worker has
        self._tried = 0  # the same in the division that this worker has begun last, and may not have ended
        self._drawn = 0  # samples of this worker's part
        self._seen: list[int] = []  # by place: the samples that were drawn until the last averaging
        self._speeds: list[float] = []  # by place: samples drawn, with those of long ago counting less
        self._has_all = True  # whether each member of the group has a place

    def begin(self) -> None:
        """See Data."""
        if self._number == 0:
            self._sampler.reset()
            self._tried, size = self._sampler.place()
            self._share(self._sampler.epoch, self._sampler.remaining_indices, [0.0] * size)

    def drew(self, batch: int, samples: int) -> None:
        """See Data."""
        self._drawn += samples

    def next_epoch(self, epoch: int) -> None:
        """See Data."""
        if self._sampler.epoch < epoch:  # the loop was left early; the others follow at the next division
            self._share(epoch, self._sampler.order(epoch), self._speeds)

    def is_beyond(self, epoch: int) -> bool:
        """See Data."""
        return self._sampler.epoch > epoch

    def numbers(self) -> list[int]:
        """See Data."""
        return [self._sampler.epoch, self._number, self._place, self._drawn]

    def heard(self, numbers: Sequence[Sequence[int]]) -> None:
        """See Data."""
        for epoch, number, place, drawn in numbers:
            if (epoch, number) == (self._sampler.epoch, self._number) and place != _NOWHERE:
                self._seen[place] = max(self._seen[place], drawn)

    def welcome(self, control: Communicator, *, divides: bool) -> None:
        """See Data. Without a division newcomers get no part until the next one."""
        self._has_all = divides
        if divides:
            self.divide(control)

    def divide(self, control: Communicator) -> None:
        """See Data."""
        self._follow(control)
        self._tried, size = self._sampler.place()
        every = gather_numbers(control, self._place, self._drawn, self._tried, *self._seen)
        every = [own for own in every if own[0] != _NOWHERE]
        drawn = [max(seen) for seen in zip(*(own[3:] for own in every), strict=True)]
        for place, own, *_ in every:
            drawn[place] = own
        before, left = self._sampler.remaining_indices, list[int]()
        for (begin, end), own in zip(self._cuts(len(before)), drawn, strict=True):
            left += before[begin + own : end]
        speeds = [0.0] * size
        for place, own, rank, *_ in every:
            speeds[rank] = self._speeds[place] / 2 + own
        known = [speeds[rank] for _, _, rank, *_ in every]
        for rank in set(range(size)) - {own[2] for own in every}:
            speeds[rank] = sum(known) / len(known)  # a newcomer
        epoch = self._sampler.epoch
        if epoch < self.last_epoch and len(left) < self._batch * size:
            epoch, left = epoch + 1, left + self._sampler.order(epoch + 1)
        elif not left or (self._drop_last and len(left) < self._batch):
            epoch, left = epoch + 1, self._sampler.order(epoch + 1)
        self._share(epoch, left, speeds)
        self._has_all = True

    def state_dict(self) -> dict[str, Any]:
        """See Data."""
        division = {"number": self._number, "speeds": list(self._speeds), "seen": list(self._seen)}
        return super().state_dict() | division | {"has_all": self._has_all}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Data."""
        self._has_all = state["has_all"]
        self._tried = self._sampler.place()[0] if self._has_all else _NOWHERE
        self._take(state)

    def _take(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["number"] > 0:
            self._share(state["epoch"], self._sampler.remaining_indices, state["speeds"])
            self._number, self._seen = state["number"], state["seen"]

    def _follow(self, control: Communicator) -> None:
        """Bring ranks that have missed the end of the last division to the state of those that have not. Collective."""
        every = [tuple(own) for own in gather_numbers(control, self._sampler.epoch, self._number)]
        newest = max(every)
        if min(every) == newest:
            return
        is_behind = every[control.rank] < newest
        state = broadcast_state(control, self.state_dict, every.index(newest), take=is_behind)
        if is_behind:
            self._take(state)

    def _share(self, epoch: int, left: list[int], speeds: list[float]) -> None:
        self._place, self._speeds = self._tried, speeds
        self._number, self._drawn, self._seen = self._number + 1, 0, [0] * len(speeds)
        self.is_dry = self._place == _NOWHERE
        begin, end = (0, 0) if self.is_dry else self._cuts(len(left))[self._place]
        self._sampler.share_out(epoch, left, begin=begin, end=end)

    def _cuts(self, count: int) -> list[tuple[int, int]]:
        """Return where the part of each place begins and ends, if so many samples were left at the last division."""
        batches = -(-count // self._batch)
        least = max(sum(self._speeds) / len(self._speeds) / 100, 1e-9)  # nobody is left out for ever
        speeds = [max(speed, least) for speed in self._speeds]
        ends, done = [], 0.0
        for speed in speeds:
            done += speed
            ends.append(min(count, round(batches * done / sum(speeds)) * self._batch))
        return list(zip([0, *ends[:-1]], ends, strict=True))
