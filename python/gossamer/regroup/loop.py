"""gs.elastic(): the object that a plain training loop iterates over.

It draws batches, counts them, and at the boundary of two steps lets the group change. survival.py does the work inside
a step.
"""

import io
import logging
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from gossamer import config, membership, runtime
from gossamer.algorithms import Algorithm, AsyncModelAverage, LocalSGD, Sharded
from gossamer.algorithms.qadam import AdamAlgorithm
from gossamer.comm import gather_numbers
from gossamer.engine import Face, optimizers_of
from gossamer.engine.survival import why_not_elastic
from gossamer.errors import ConfigError, GossamerError
from gossamer.membership import ADDED, GOING
from gossamer.regroup.asynchronous import AsyncSurvivor
from gossamer.regroup.averaging import AveragingSurvivor
from gossamer.regroup.consensus import ConsensusSurvivor
from gossamer.regroup.data import EvenData, UnevenData
from gossamer.regroup.deadline import Deadline
from gossamer.regroup.gradients import GradientSurvivor
from gossamer.regroup.newcomer import Copy, enter_with
from gossamer.regroup.peers import PeersSurvivor
from gossamer.regroup.sharded import ShardedSurvivor
from gossamer.regroup.survival import Survivor, Wish
from gossamer.sampler import ElasticSampler

_log = logging.getLogger("gossamer")
_NO, _GOES, _STOPS = range(3)


class DriverLostError(GossamerError):
    """The driver of this run is gone, so no group can be formed any more."""


class Elastic:
    """Iterates over the batches of a loader, while workers die and come. Made by elastic().

    Attributes:
        epoch: the number of the present epoch, from 0.
        step: synchronised steps so far, by all workers together; by local_sgd and async, steps of each worker.
    """

    epoch: int

    def __init__(
        self,
        loader: Iterable[Any],
        model: Face,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        schedulers: Sequence[Any],
        values: dict[str, Any],
        deadline: Deadline,
        on_stop: Callable[[], None] | None,
        copy: Copy | None,
    ) -> None:
        sampler = getattr(loader, "sampler", None)
        if not isinstance(sampler, ElasticSampler):
            raise ConfigError(
                f"elastic: the loader must have a gs.ElasticSampler, which divides what is left of an epoch among the "
                f"workers that are there, got {type(sampler).__name__}; give DataLoader(dataset, ..., "
                f"sampler=gs.ElasticSampler(dataset))"
            )
        if problem := _unreadable(values):
            raise ConfigError(
                f"elastic: values must be numbers, texts, tensors, or lists and dicts of them, got {problem}"
            )
        self.epoch = 0
        self._loader, self._sampler, self._face = loader, sampler, model
        self._optimizers, self._schedulers = list(optimizers), list(schedulers)
        self._names = list(values)
        vars(self).update(values)
        self._member, self._on_stop = membership.member(), on_stop
        algorithm = model.engine.algorithm
        self._data = (
            UnevenData(sampler, self._batch_size, drop_last=bool(getattr(loader, "drop_last", False)))
            if algorithm.uneven_steps
            else EvenData(sampler)
        )
        self._survivor: Survivor[Any] = _kind_for(algorithm)(
            model, optimizers, data=self._data, deadline=deadline, save=self._save, load=self._load, copy=copy
        )
        self._divided_at: int | None = None  # the survivor's count at the last division of data
        self._has_new_part = False  # since the last boundary
        self._survivor.begin()
        self._data.begin()
        if self._member is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._told_to_go)
            self._member.ends_when_told()

    @property
    def step(self) -> int:
        """Synchronised steps so far, by all workers together; by local_sgd and async, steps of each worker."""
        return self._face.engine.backward_count

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of `count`, and wait for the others after the last one."""
        self._data.last_epoch = count - 1
        while self.epoch < count:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:  # else this rank was late, and has followed the others
                self._data.next_epoch(epoch + 1)
                self.epoch = epoch + 1
        self._survivor.finish()
        # A rank that has missed the last message takes what it brought from one that has it.
        while self._member is not None and not self._survivor.has_met:
            self._boundary()
            self._survivor.at_boundary(self._survivor.meet)
        self._survivor.close()

    def __len__(self) -> int:
        """Return the number of this epoch's batches that are left, if the group stays as it is."""
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this worker that are left of this epoch."""
        epoch = self.epoch
        while self.epoch == epoch and not self._data.is_beyond(epoch):
            batches, drawn = iter(self._loader), 0
            while not self._boundary():
                try:
                    batch = next(batches)
                except StopIteration:
                    if not self._data.uneven:
                        return
                    self._data.is_dry = True  # the boundary ends with another part
                    continue
                samples = len(self._sampler.get_indices(drawn, self._batch_size))
                yield batch
                self._data.drew(drawn, samples)
                drawn += 1

    @property
    def _batch_size(self) -> int:
        return int(self._loader.batch_size)  # type: ignore[attr-defined]

    # --- between two steps ---

    def _boundary(self) -> bool:
        """Average, divide the data and let the group change, if that is due. Return whether data has been divided."""
        member, survivor = self._member, self._survivor
        self._has_new_part = False
        if member is None and not self._data.uneven:
            return False
        survivor.look()
        while True:
            if member is not None:
                grows = member.update == ADDED
                change = member.going or bool(member.lost_driver or (member.update and not grows))
                survivor.wish(change=change, grows=grows, stop=member.stops)
            changes_at = survivor.changes_at
            stays = changes_at is None
            if changes_at is not None and survivor.count >= changes_at:
                self._has_new_part = True
                survivor.complete_change()
                self._divided_at = survivor.count
            elif stays and survivor.wished_first:
                survivor.change()
            elif stays and survivor.wished is Wish.CHANGE:
                if survivor.at_boundary(self._who_goes):
                    survivor.change()
            elif stays and survivor.wished is Wish.DIVISION and survivor.count != self._divided_at:
                if survivor.at_boundary(self._divide):
                    self._has_new_part, self._divided_at = True, survivor.count
            elif (work := survivor.work()) is not None:
                survivor.at_boundary(work)
            else:
                return self._has_new_part

    def _divide(self) -> None:
        self._data.divide(self._survivor.control)

    def _who_goes(self) -> None:
        """End this process if it was told to go, and all processes if the launcher was. Collective."""
        member = self._member
        assert member is not None
        mine = _STOPS if member.stops else _GOES if member.going else _NO
        every = [what for [what] in gather_numbers(self._survivor.control, mine)]
        if mine == _GOES or _STOPS in every:
            self._survivor.part()
        if _STOPS in every or all(what == _GOES for what in every):
            if self._on_stop is not None:
                self._on_stop()
            if member.lost_driver:
                raise DriverLostError(member.lost_driver)
            raise SystemExit(0)
        if mine == _GOES:
            member.leave(GOING, skip_sync=True)
            raise SystemExit(0)

    def _told_to_go(self, _number: int, _frame: FrameType | None) -> None:
        if self._member is not None:
            self._member.going = True

    # --- what a newcomer takes ---

    def _save(self, with_states: bool) -> dict[str, Any]:
        save = self._survivor.save_optimizer
        values = {name: getattr(self, name) for name in self._names}
        return {
            "optimizers": [save(each, with_state=with_states) for each in self._optimizers],
            "schedulers": [each.state_dict() for each in self._schedulers],
            "data": self._data.state_dict(),
            "values": values,
            "epoch": self.epoch,
            "random": random.getstate(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            self._survivor.load_optimizer(optimizer, saved)
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self._data.load_state_dict(state["data"])
        self._has_new_part = True
        vars(self).update(state["values"])
        self.epoch = state["epoch"]
        random.setstate(state["random"])


def _copied(model: Face, optimizers: Sequence[torch.optim.Optimizer]) -> Copy | None:
    """On a newcomer, copy the state of those that train on. Return what has it; None: nothing has all of it."""
    copy = _kind_for(model.algorithm_given).copy_for(model, optimizers)
    return copy if enter_with(copy) else None


def _kind_for(algorithm: Algorithm) -> type[Survivor[Any]]:
    if isinstance(algorithm, AsyncModelAverage):
        return AsyncSurvivor
    if isinstance(algorithm, LocalSGD) and algorithm.topology is not None:
        return PeersSurvivor
    if algorithm.independent:
        return AveragingSurvivor
    if isinstance(algorithm, Sharded):
        return ShardedSurvivor
    sends_more = isinstance(algorithm, AdamAlgorithm) or algorithm.own_weights
    return ConsensusSurvivor if sends_more else GradientSurvivor


def _unreadable(values: dict[str, Any]) -> str:
    """Return the names and classes of the values that a newcomer could not read without unpickling objects."""
    bad = []
    for name, value in values.items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception:  # a class of the user may raise anything when it is pickled
            bad.append(f"{name}, a {type(value).__qualname__}")
    return "; ".join(bad)


def elastic(
    loader: Iterable[Any],
    model: Face,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    scheduler: Any = None,
    on_stop: Callable[[], None] | None = None,
    deadline_s: float | None = None,
    deadline_mads: float | None = None,
    **values: Any,
) -> Elastic:
    """Makes a plain training loop survive its workers, under `gossamer run --min-np M --max-np N`. Collective.

    >>> run = gs.elastic(loader, model, optimizer)
    >>> for epoch in run.epochs(3):
    >>>     for inputs, targets in run:
    >>>         optimizer.zero_grad()
    >>>         loss_of(model(inputs), targets).backward()
    >>>         optimizer.step()

    When a worker dies, the others form a group inside backward(), and end that step with their own gradients. By
    local_sgd and async they train on, and form it at the next averaging. Nothing is done again, and no exception
    reaches the loop. A new worker takes weights, buffers, the state of the optimizer, the place in the data and
    `values` from one that trains: what is large while all others train on. In any other run the loop works too, and a
    death ends it.

    Args:
        loader: a DataLoader with a batch_size and sampler=gs.ElasticSampler(dataset).
        model: a gs.DataParallel by any algorithm; gs.Sharded needs holders=2.
        optimizer: the model's optimizer, or several.
        scheduler: objects with state_dict() and load_state_dict() that newcomers take too: one, several or None.
        on_stop: called on every worker when the launcher has been told to end (SIGTERM), before the worker ends with
            code 0. It may save a checkpoint on rank 0.
        deadline_s: by local_sgd, the seconds that workers wait for others in an averaging. Who is later is left out. It
            comes back at a later averaging, with what it has learned meanwhile. None: they wait.
        deadline_mads: the same in median absolute deviations above the median of a worker's last 20 waits. At least 1 s
            and half of the median above it.
        values: attributes of the result that newcomers take too: numbers, texts, tensors, and lists and dicts of them.

    Raises:
        ConfigError: something else was given, or the model's group cannot be replaced.
        CommError: this worker has come while others trained, and all that held the state are dead.
    """
    if not (isinstance(model, Face) and model.replaceable):
        raise ConfigError(f"elastic: model must be a gs.DataParallel, got {type(model).__name__}")
    optimizers = optimizers_of("elastic", optimizer)
    if not optimizers:
        raise ConfigError("elastic: needs the model's optimizer, whose state a newcomer takes, got None")
    copy = _copied(model, optimizers) if model.awaits_group else None
    if refusal := why_not_elastic(model):
        raise ConfigError(f"elastic: {refusal}")
    if known := sorted(set(values) & set(dir(Elastic))):
        raise ConfigError(f"elastic: values must have names that the result does not have, got {known}")
    deadline = Deadline(deadline_s, deadline_mads)
    if deadline.given and _kind_for(model.engine.algorithm) is not AveragingSurvivor:
        raise ConfigError(
            f"elastic: a deadline needs gs.LocalSGD without a topology, in whose averagings all workers wait for each "
            f"other, got {model.engine.algorithm!r}"
        )
    if not runtime.is_initialized():
        raise ConfigError("elastic: needs the group of workers; call gossamer.init() first")
    if membership.member() is None and config.launched_by() == "torchrun" and runtime.size() > 1:
        _log.warning(
            "elastic: rank %d/%d was started by torchrun, or by gossamer run without --min-np: all workers end if one "
            "dies, and start anew; `gossamer run --min-np M` keeps them, and lets others come",
            runtime.rank(),
            runtime.size(),
        )
    if deadline.given and membership.member() is None and runtime.size() > 1:
        raise ConfigError(
            f"elastic: a deadline needs `gossamer run --min-np M`, which takes in who was late, got deadline_s="
            f"{deadline_s!r} and deadline_mads={deadline_mads!r}"
        )
    schedulers = (
        [] if scheduler is None else scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
    )
    return Elastic(
        loader,
        model,
        optimizers,
        schedulers=schedulers,
        values=values,
        deadline=deadline,
        on_stop=on_stop,
        copy=copy,
    )
