# The driver of an elastic run. It starts workers in free slots, notices when a worker dies (_reap), and forms groups
# (_regroup). A group is formed when every worker of the present one has left it, as the board asks them to. A newcomer
# takes part once it is ready. So no group waits for a dead member, or for a process that still starts or builds its
# model. Used by command.py.
"""Who is in the group."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch.distributed.elastic.multiprocessing.api import SignalException

from gossamer.errors import CommError
from gossamer.launch.elastic.board import Board, News
from gossamer.launch.elastic.newcomers import Newcomers
from gossamer.launch.elastic.process import Worker
from gossamer.launch.elastic.slots import Slot, Slots, seats
from gossamer.launch.outcome import Failure, Outcome, how_it_ended
from gossamer.membership import ADDED, GOING, STOP
from gossamer.signals import held_back

STEP_S = 0.05
SILENT_S = 15.0  # the driver says that it waits after this time
PATIENCE_S = 30.0  # for workers that were told to end
LATE_S = 1.0  # in which members must come back from a group that was ended because one of them was late
STOPPING = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
)  # those that torch makes exceptions of


@dataclass(frozen=True)
class Limits:
    """Limits of the groups.

    Args:
        min_size, max_size: workers of a group.
        first_size: workers of the first group, unless they take longer than timeout_s to come.
        timeout_s: seconds in which a group must form.
        grace_s: seconds in which workers must end that were told to.
        give_up_s: seconds in which all members must come back from a group that has failed; the others are killed then.
        resets: how many groups may follow the first; None: any number.
    """

    min_size: int
    max_size: int
    first_size: int
    timeout_s: float = 600.0
    grace_s: float = PATIENCE_S
    give_up_s: float = 600.0
    resets: int | None = None


class Driver:
    """Runs one program elastically.

    Args:
        start: starts a worker, given its number, its slot and its variables.
        slots: where workers may run.
        board: how driver and workers talk.
        limits: of the groups.
    """

    def __init__(
        self,
        start: Callable[[int, Slot, Mapping[str, str]], Worker],
        *,
        slots: Slots,
        board: Board,
        limits: Limits,
    ) -> None:
        self._start = start
        self.slots: Slots = slots
        self.board: Board = board
        self.limits: Limits = limits
        self.newcomers: Newcomers = Newcomers(board)
        self.epoch: int = 0
        self.workers: dict[int, Worker] = {}  # the workers that run
        self.members: list[int] = []  # the present group by rank, also members that have ended
        # Workers that ended by an error of their own. Such an error ends the run.
        self.failures: list[Failure] = []
        self.finished: set[int] = set()  # workers that ended well without being told to
        self._started = 0
        self._told_to_go: set[int] = set()
        self._waiting = False  # whether the user was told that it waits
        self._stopping = False  # whether the group was told to end
        self._given_up: set[int] = set()
        # When a member of the present group has said that it waits for another one that is late.
        self._complained_at: float | None = None
        # Workers that were left out: the group that they are still in, and when.
        self._late: dict[int, tuple[int, float]] = {}
        self._unformed_since = time.monotonic()

    def run(self) -> Outcome:
        """Runs until a group has finished, or a worker has ended with an error of its own.

        Raises:
            CommError: no group could be formed within the limits.
        """
        try:
            while self.step():
                time.sleep(STEP_S)
        except (SignalException, KeyboardInterrupt):
            if self._end_well():
                return Outcome()
            raise
        finally:
            self.end_all()
        return Outcome(self.failures)

    def step(self) -> bool:
        """Looks at everything once, and returns False once the run is over. Raises as run() does."""
        with held_back(*STOPPING):  # a group that is half formed would wait for ever
            self._reap()
        if self.failures:
            self.failures += self.end_all()
            return False
        self._start_workers()
        with held_back(*STOPPING):
            self._regroup()
        self.board.tidy()
        return not self._over()

    def _end_well(self) -> bool:
        """Lets the group end by itself at a common step, if it can. Returns whether it has ended well in time.

        Members that are between two groups form the next one first. Workers outside of the group are ended.
        """
        if not (self.epoch and self.board.end_when_told(self._living())):
            return False
        self._stopping = True
        due = time.monotonic() + self.limits.grace_s
        while self._living() and time.monotonic() < due:
            for number in self.workers.keys() - set(self.members) - self._told_to_go:
                self._end(number)
            if not self.step():
                break
            time.sleep(STEP_S)
        return not self.failures and not self._living()

    def _living(self) -> list[int]:
        """The members of the present group that run, by rank."""
        return [number for number in self.members if number in self.workers]

    def end_all(self) -> list[Failure]:
        """Ends all workers, and returns the failures that they then report. A signal kills them."""
        try:
            return self._end_in_time()
        except (SignalException, KeyboardInterrupt):
            with held_back(*STOPPING):
                for worker in self.workers.values():
                    worker.kill()
            raise
        finally:
            self.workers.clear()

    def _end_in_time(self) -> list[Failure]:
        for worker in self.workers.values():
            worker.end()
        failures: list[Failure] = []
        due = time.monotonic() + self.limits.grace_s
        for worker in self.workers.values():
            while (outcome := worker.ended()) is False and time.monotonic() < due:
                time.sleep(STEP_S)
            if outcome is False:
                worker.kill()
            elif isinstance(outcome, Failure):
                failures.append(self._by_rank(outcome))
        return failures

    def _by_rank(self, failure: Failure) -> Failure:
        """Returns the failure with the worker's rank; a worker without a rank keeps its number."""
        number = failure.rank
        return replace(failure, rank=self.members.index(number)) if number in self.members else failure

    def _over(self) -> bool:
        """Returns whether all members have ended, one of them well. Newcomers are not needed any more then."""
        awaited = self.members if self.epoch else self.workers  # a script need not form a group at all
        return bool(self.finished) and not any(number in self.workers for number in awaited)

    def _reap(self) -> None:
        for number, worker in list(self.workers.items()):
            outcome = worker.ended()
            if outcome is False:
                continue
            del self.workers[number]
            self._late.pop(number, None)
            self.newcomers.forget(number)
            newcomer = self.epoch > 0 and not self.newcomers.have_been_seated(number)
            if isinstance(outcome, Failure) and outcome.exit_code > 0 and not newcomer:
                # The script has raised, or chosen its exit code: that would happen again.
                self.failures = [self._by_rank(outcome)]
                return
            if self._is_going(number):
                self.slots.fail(worker.slot)
                print(
                    f"gossamer run: {_named(worker)} has gone, as it was told; {len(self.workers)} are left",
                    file=sys.stderr,
                )
            if number in self._told_to_go:
                continue
            if outcome is True and not newcomer:
                self.finished.add(number)
                continue
            self.slots.fail(worker.slot)
            if number in self.members:
                self.board.declare_broken(self.epoch)
            print(
                f"gossamer run: {_named(worker)} {_how(outcome)}"
                f"{' before it took part' if newcomer else ''}; {len(self.workers)} are left",
                file=sys.stderr,
            )

    def _is_going(self, number: int) -> bool:
        """Returns whether a worker was told by others to end, and has said so."""
        news = self.board.news([number]).get(number)
        if news is None or news.reason != GOING:
            return False
        self._told_to_go.add(number)
        return True

    def _start_workers(self) -> None:
        if self.finished or self._stopping:
            return
        taken = {worker.slot for worker in self.workers.values()}
        for slot in self.slots.usable():
            if slot in taken:
                continue
            if len(self.workers) >= self.limits.max_size:
                return
            number, self._started = self._started, self._started + 1
            self.board.admit(number)
            env = {
                "GOSSAMER_ELASTIC_BOARD": self.board.endpoint,
                "GOSSAMER_ELASTIC_WORKER": str(number),
                "GOSSAMER_ELASTIC_LAUNCHER": str(os.getpid()),
                "HOROVOD_ELASTIC": "1",
                "HOROVOD_HOSTNAME": slot.host,
            }
            self.workers[number] = self._start(number, slot, env)

    def _regroup(self) -> None:
        """Forms a new group if one is due and all its workers have come; otherwise asks them to come."""
        news = self.board.news(list(self.workers))
        now = time.monotonic()
        if self.epoch and self._complained_at is None and self.board.has_late_member(self.epoch):
            self._complained_at = now
            self.board.declare_broken(self.epoch)
        absent = {each: since for each, (epoch, since) in self._late.items() if news[each].left < epoch}
        self._give_up([each for each, since in absent.items() if now - since > self.limits.give_up_s])
        present = set(self.slots.present())
        removed = [number for number, worker in self.workers.items() if worker.slot not in present]
        living = self._living()
        left = [number for number in living if number in news and news[number].left == self.epoch]
        new = self._new({each: own for each, own in news.items() if each not in absent}, living, removed)
        dead = len(living) + len(self.finished & set(self.members)) < len(self.members)
        for number in set(removed) - set(self.members) - self._told_to_go:
            self._end(number)  # its slot is gone, and no group would miss it
        if self.epoch and not (left or (dead and not self.finished)):
            # A group that works: it goes on until its next commit.
            self._unformed_since = time.monotonic()
            going = set(removed) & set(living)
            if self._stopping:
                self.board.announce_update(self.epoch, kind=STOP)
            elif not self.finished and (going or self.newcomers.gathered(new)):
                self.board.announce_update(self.epoch, kind=ADDED if new else "removed")
            return
        if any(news[number].reason == "error" for number in left):
            self.board.declare_broken(self.epoch)
        staying = [number for number in left if number not in removed and news[number].reason != GOING]
        members = staying + sorted(new)
        timeout_s = self.limits.timeout_s
        late = time.monotonic() - self._unformed_since > timeout_s
        most = self.slots.at_most() + len(self.finished)
        needed: float = self.limits.first_size if not (self.epoch or late) else self.limits.min_size
        needed = 1 if self._stopping else max(self.limits.min_size, min(needed, most))
        enough = len(members) + len(self.finished) >= needed and members
        if len(left) == len(living) and enough:
            self._form(members, removed, news)
        elif enough and self._is_lateness(now):
            self._leave_out([number for number in living if number not in left])
            self._form(members, removed, news)
        elif enough and time.monotonic() - self._unformed_since > self.limits.give_up_s:
            self._give_up([number for number in living if number not in left])
        elif late or most < needed:
            raise CommError(self._no_group(living, left, members))
        elif not self._waiting and time.monotonic() - self._unformed_since > min(SILENT_S, timeout_s / 4):
            self._waiting = True
            print(
                f"gossamer run: {len(members)} workers are ready; waits up to {timeout_s:g} s for {needed}",
                file=sys.stderr,
            )

    def _is_lateness(self, now: float) -> bool:
        """Returns whether the group was ended because a member was late, and the others have had time to come back.

        If no member leaves it soon, the late one has come in the last moment, and all go on to their next meeting.
        """
        at = self._complained_at
        left_at = self._unformed_since
        return at is not None and left_at < at + LATE_S and left_at + LATE_S < now

    def _leave_out(self, late: list[int]) -> None:
        for number in late:
            self._late[number] = self.epoch, time.monotonic()
            print(
                f"gossamer run: {_named(self.workers[number])} is late; the others go on, and take it in when it comes",
                file=sys.stderr,
            )

    def _give_up(self, stuck: list[int]) -> None:
        for number in stuck:
            if number in self._given_up:
                continue
            self._given_up.add(number)
            group, _ = self._late.get(number, (self.epoch, 0.0))
            print(
                f"gossamer run: {_named(self.workers[number])} has not come back from group "
                f"{group}, which has failed, in {self.limits.give_up_s:g} s; it is given up and killed",
                file=sys.stderr,
            )
            self.workers[number].give_up()

    def _form(self, members: list[int], removed: list[int], news: dict[int, News]) -> None:
        resets = self.limits.resets
        if resets is not None and self.epoch > resets:
            raise CommError(
                f"elastic: the group has been formed anew {resets} times, as --reset-limit allows, and "
                f"would have to be again, with {len(members)} workers; find out why workers end or come so often"
            )
        self.newcomers.seat(members)
        self.epoch += 1
        self.members = members
        self._waiting = False
        self._complained_at = None
        for number in members:
            self._late.pop(number, None)
        sync = not all(news[number].skip_sync for number in self.members)
        slots = {number: self.workers[number].slot for number in self.members}
        self.board.publish(self.epoch, seats=seats(slots), removed=removed, sync=sync)
        self._told_to_go |= set(removed)
        self._unformed_since = time.monotonic()

    def _new(self, news: dict[int, News], living: list[int], removed: list[int]) -> list[int]:
        """Returns the workers that a group may take in."""
        inside = {*self.members, *removed}
        staying = {number: each for number, each in news.items() if each.reason != GOING}
        outside = {
            number: each for number, each in staying.items() if number not in inside | self._told_to_go
        }
        if living:
            others = sorted(set(self.workers) - set(living) - set(removed))
            slots = {each: self.workers[each].slot for each in [*living, *others]}
            return self.newcomers.welcome(outside, slots)
        if self.epoch and not self.finished:
            for number in self.newcomers.preparing - self._told_to_go:
                print(
                    f"gossamer run: worker {number} starts again: all that it was to join are dead",
                    file=sys.stderr,
                )
                self._end(number)
        return self.newcomers.without_a_group(outside)

    def _end(self, number: int) -> None:
        self._told_to_go.add(number)
        self.workers[number].end()

    def _no_group(self, living: list[int], left: list[int], members: list[int]) -> str:
        here = f"{len(self.workers)} workers are there, fewer than --min-np {self.limits.min_size}"
        if self.slots.at_most() < self.limits.min_size:
            return (
                f"elastic: {here}, and no slot is left for another; give --blacklist-cooldown-range to use slots "
                f"again whose workers have died, or --host-discovery-script"
            )
        begin = f"elastic: no group has formed within --elastic-timeout {self.limits.timeout_s:g} s: "
        if stuck := sorted(set(living) - set(left)):
            return begin + (
                f"workers {stuck} have not come back from the group before, in which others have failed; "
                f"they do something else than communicate"
            )
        if preparing := sorted(self.newcomers.preparing):
            return begin + (
                f"workers {preparing} have come while others trained, and are not ready: they have called hvd.init(), "
                f"and not yet the function of hvd.elastic.run"
            )
        return begin + f"{here}; {len(self.slots.usable())} of {len(self.slots.present())} slots are usable"


def _named(worker: Worker) -> str:
    return f"worker {worker.number} (slot {worker.slot.index} of {worker.slot.host})"


def _how(outcome: bool | Failure) -> str:
    """How a worker has ended, in words."""
    if not isinstance(outcome, Failure):
        return "ended"
    if outcome.exit_code < 0 and outcome.trace:
        return f"has been lost: {outcome.trace}"
    return how_it_ended(outcome.exit_code)
