# The driver of elastic runs, with processes that only sleep: Member objects of this process tell the board what their
# workers would tell it.

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from gossamer.config import Placement
from gossamer.errors import CommError
from gossamer.launch.elastic.board import Board
from gossamer.launch.elastic.driver import Driver, Limits
from gossamer.launch.elastic.process import LocalWorker, Program
from gossamer.launch.elastic.slots import Slot, Slots
from gossamer.launch.outcome import describe
from gossamer.membership import WATCH_S, Member, Outlook, Seat

SLEEP = ["sleep", "100"]


class Run:
    """A driver, and the members that stand for its workers."""

    def __init__(
        self, folder, hosts: dict[str, int], limits: Limits, *, cooldown_s=None, command=SLEEP, fixed=False
    ) -> None:
        self.hosts = hosts
        self.board = Board()
        slots = Slots(hosts if fixed else lambda: self.hosts, cooldown_s)
        program = Program(command, str(folder), tee="0")

        def begin(number: int, slot: Slot, env: Mapping[str, str]) -> LocalWorker:
            return LocalWorker(program, number, slot, env=env)

        self.driver = Driver(begin, slots=slots, board=self.board, limits=limits)
        self.members: dict[int, Member] = {}
        self.pool = ThreadPoolExecutor(20)

    def __getitem__(self, number: int) -> Member:
        if number not in self.members:
            host, _, port = self.board.endpoint.rpartition(":")
            self.members[number] = Member(host, int(port), worker=number, launcher=os.getpid())
        return self.members[number]

    def take_seats(self, *numbers: int) -> dict[int, "Future[Seat]"]:
        return {number: self.pool.submit(self[number].take_seat) for number in numbers}

    def step_until(self, condition: Callable[[], bool], timeout_s: float = 20) -> None:
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until
            self.driver.step()
            time.sleep(0.01)

    def seated(self, *numbers: int) -> list[Seat]:
        """The seats of these workers, which have left their group or are new, once all of them have one."""
        futures = self.take_seats(*numbers).values()
        self.step_until(lambda: all(future.done() for future in futures))
        return [future.result() for future in futures]

    def kill(self, number: int) -> None:
        self.driver.workers[number].signal(signal.SIGKILL)
        self.step_until(lambda: number not in self.driver.workers)

    def announced(self, number: int) -> Outlook | None:
        """The announcement for a worker that has come."""
        self.step_until(lambda: number in self.driver.workers)
        answer = self.pool.submit(self[number].announce)
        self.step_until(answer.done)
        return answer.result()

    def leave(self, reason: str, *numbers: int, skip_sync: bool = False) -> None:
        for number in numbers:
            self[number].leave(reason, skip_sync=skip_sync)


@pytest.fixture
def begin(tmp_path) -> Iterator[Callable[..., Run]]:
    handlers = {number: signal.getsignal(number) for number in (2, 15, 1, 3)}  # torch sets its own
    runs: list[Run] = []

    def begin(hosts: dict[str, int], limits: Limits, **kwargs) -> Run:
        runs.append(Run(tmp_path, hosts, limits, **kwargs))
        runs[-1].driver.step()
        return runs[-1]

    yield begin
    for each in runs:
        each.driver.end_all()
        for member in each.members.values():
            member._lost = "the test is over"
        each.pool.shutdown(wait=False, cancel_futures=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def ranks(found: list[Seat]) -> list[tuple[int, int]]:
    return [(seat.placement.rank, seat.placement.size) for seat in found]


def test_survivors_keep_their_order_and_rank_0_is_one_of_them(begin) -> None:
    run = begin({"localhost": 4}, Limits(2, 4, 4), cooldown_s=(0, 0))
    assert ranks(run.seated(0, 1, 2, 3)) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    run.kill(0)
    run.leave("error", 1, 2, 3)
    found = run.seated(1, 2, 3)
    assert ranks(found) == [(0, 3), (1, 3), (2, 3)]
    assert {seat.epoch for seat in found} == {2}
    # The slot is free again, so there is a new worker: number 4, the next group asks for it.
    waiting = run.take_seats(4)
    run.step_until(lambda: run[1].update == "added")
    run.leave("update", 1, 2, 3)
    assert ranks(run.seated(1, 2, 3)) == [(0, 4), (1, 4), (2, 4)]
    newcomer = waiting[4].result(5)
    assert ranks([newcomer]) == [(3, 4)]
    assert newcomer.placement.local_rank == 0, "the place of the worker that died"


def test_members_learn_which_newcomer_asks_for_the_state_and_how_often(begin) -> None:
    run = begin({"a": 2}, Limits(1, 4, 2))
    run.seated(0, 1)
    run.hosts = {"a": 3}
    run.announced(2)
    assert run[2].ask_for_copy() == 1
    run.step_until(lambda: run[0].copying == {2: 1})
    assert run[2].ask_for_copy() == 2
    run.step_until(lambda: run[1].copying == {2: 2})
    for _ in range(5):
        run.driver.step()
        time.sleep(WATCH_S)
    assert not run[0].update, "it is not ready"
    newcomer = run.take_seats(2)[2]
    run.step_until(lambda: run[0].update == "added" and not run[0].copying)
    run.leave("update", 0, 1)
    for seat in [*run.seated(0, 1), newcomer.result(5)]:
        assert seat.workers == (0, 1, 2)


def test_a_newcomer_that_dies_while_it_copies_is_forgotten(begin) -> None:
    run = begin({"a": 2}, Limits(1, 4, 2), cooldown_s=(60, 60))
    run.seated(0, 1)
    run.hosts = {"a": 3}
    run.announced(2)
    run[2].ask_for_copy()
    run.step_until(lambda: run[0].copying == {2: 1})
    run.kill(2)
    run.step_until(lambda: not run[0].copying)
    assert not run[0].update


def test_a_newcomer_is_told_its_place_at_once_and_taken_in_when_it_is_ready(begin) -> None:
    run = begin({"a": 1, "b": 1}, Limits(1, 4, 2))
    first = [run.pool.submit(run[number].announce) for number in (0, 1)]
    waiting = run.take_seats(0, 1)
    run.step_until(lambda: all(each.done() for each in [*first, *waiting.values()]))
    assert [each.result() for each in first] == [None, None], "a first group keeps nobody waiting"
    run.hosts = {"a": 2, "b": 1}
    outlook = run.announced(2)
    assert outlook.placement == Placement("elastic", 2, 3, 1, 2)
    assert outlook.locals == [(0, 2), (0, 1), (1, 2)]
    for _ in range(5):
        run.driver.step()
        time.sleep(WATCH_S)
    assert not run[0].update, "it is not ready"
    newcomer = run.take_seats(2)[2]
    run.step_until(lambda: run[0].update == "added")
    run.leave("update", 0, 1)
    assert ranks(run.seated(0, 1)) == [(0, 3), (1, 3)]
    assert newcomer.result(5).placement == outlook.placement


def test_the_death_of_a_member_is_told_to_those_that_do_not_communicate(begin) -> None:
    run = begin({"localhost": 2}, Limits(1, 2, 2))
    run.seated(0, 1)
    assert not run[0].broken
    run.kill(1)
    run.step_until(lambda: bool(run[0].broken), 5)
    assert "has lost a member" in run[0].broken


def test_an_error_without_a_death_breaks_the_group_for_all(begin) -> None:
    run = begin({"localhost": 2}, Limits(1, 2, 2))
    run.seated(0, 1)
    run.leave("error", 1)
    run.step_until(lambda: bool(run[0].broken), 5)
    run.leave("error", 0)
    assert ranks(run.seated(0, 1)) == [(0, 2), (1, 2)]


def test_all_members_get_the_same_answer_about_the_sync(begin) -> None:
    run = begin({"localhost": 3}, Limits(1, 3, 3, timeout_s=20))
    run.seated(0, 1, 2)
    run.hosts = {"localhost": 2}
    run.step_until(lambda: run[0].update == "removed")
    going = run.take_seats(2)
    run.leave("update", 0, 1, 2, skip_sync=True)
    assert [seat.sync for seat in run.seated(0, 1)] == [False, False], "only removals: none needs it"
    with pytest.raises(SystemExit) as ended:
        going[2].result(5)
    assert ended.value.code == 0
    # Meanwhile one worker is lost and one is added, so those that would skip the sync must not.
    run.driver.workers[2].signal(signal.SIGKILL)
    run.step_until(lambda: 2 not in run.driver.workers)
    run.hosts = {"localhost": 3}
    run.step_until(lambda: 3 in run.driver.workers)
    waiting = run.take_seats(3)
    run.step_until(lambda: run[0].update == "added")
    run.leave("update", 0, 1, skip_sync=True)
    found = [*run.seated(0, 1), waiting[3].result(5)]
    assert [seat.sync for seat in found] == [True, True, True]


def test_a_member_that_dies_while_the_group_comes_together_does_not_hold_it_up(begin) -> None:
    run = begin({"localhost": 3}, Limits(1, 3, 3))
    store = run.seated(0, 1, 2)[0].store()
    run.kill(2)
    # Rank 0 waits in the group's store for a key that rank 2 would have written.
    began = time.monotonic()
    waiting = run.pool.submit(store.wait, ["address of 2"])
    run.step_until(waiting.done, 10)
    with pytest.raises(RuntimeError):
        waiting.result()
    assert time.monotonic() - began < 8
    assert run[0].lost_group()
    run.leave("error", 1)
    assert ranks(run.seated(0, 1)) == [(0, 2), (1, 2)]


def test_too_few_workers_are_waited_for_and_then_it_ends_with_the_reason(begin, capfd) -> None:
    run = begin({"localhost": 2}, Limits(2, 2, 2))
    run.seated(0, 1)
    run.driver.limits = Limits(2, 2, 2, timeout_s=1.5)
    run.hosts = {"localhost": 1}
    run.kill(1)
    run.leave("error", 0)
    began = time.monotonic()
    with pytest.raises(
        CommError, match=r"--elastic-timeout 1.5 s: 1 workers are there, fewer than --min-np 2"
    ):
        run.step_until(lambda: False)
    assert time.monotonic() - began > 1
    assert "1 workers are ready; waits up to 1.5 s for 2" in capfd.readouterr().err


def test_nothing_is_waited_for_where_no_worker_can_come(begin) -> None:
    run = begin({"localhost": 2}, Limits(2, 2, 2), fixed=True)
    run.seated(0, 1)
    run.driver.workers[1].signal(signal.SIGKILL)
    with pytest.raises(CommError, match="and no slot is left for another; give --blacklist-cooldown-range"):
        run.step_until(lambda: False)


def test_workers_that_do_not_come_back_are_named(begin) -> None:
    run = begin({"localhost": 3}, Limits(1, 3, 3))
    run.seated(0, 1, 2)
    run.driver.limits = Limits(1, 3, 3, timeout_s=1)
    run.kill(2)
    run.leave("error", 0)
    with pytest.raises(CommError, match=r"workers \[1\] have not come back from the group before"):
        run.step_until(lambda: False)


def test_a_worker_that_does_not_come_back_is_given_up_if_there_are_enough_others(begin, capfd) -> None:
    run = begin({"localhost": 3}, Limits(2, 3, 3, give_up_s=0.5))
    run.seated(0, 1, 2)
    run.leave("error", 0, 2)
    assert ranks(run.seated(0, 2)) == [(0, 2), (1, 2)]
    told = capfd.readouterr().err
    assert "worker 1 (slot 1 of localhost) has not come back from group 1, which has failed, in 0.5 s" in told
    assert "worker 1 (slot 1 of localhost) was killed by signal 9 (SIGKILL)" in told


def test_nobody_is_given_up_where_the_others_are_too_few(begin) -> None:
    run = begin({"localhost": 2}, Limits(2, 2, 2, give_up_s=0.2))
    run.seated(0, 1)
    run.driver.limits = Limits(2, 2, 2, timeout_s=1, give_up_s=0.2)
    run.leave("error", 0)
    with pytest.raises(CommError, match=r"workers \[1\] have not come back from the group before"):
        run.step_until(lambda: False)


def test_newcomers_that_a_group_needs_and_that_do_not_get_ready_are_named(begin) -> None:
    run = begin({"localhost": 2}, Limits(2, 2, 2), cooldown_s=(0, 0))
    run.seated(0, 1)
    run.kill(1)
    assert run.announced(2) is not None
    run.driver.limits = Limits(2, 2, 2, timeout_s=1)
    run.leave("error", 0)
    with pytest.raises(CommError, match=r"workers \[2\] have come while others trained, and are not ready"):
        run.step_until(lambda: False)


def test_the_reset_limit_ends_the_run(begin) -> None:
    run = begin({"localhost": 3}, Limits(1, 3, 3, resets=1))
    run.seated(0, 1, 2)
    run.kill(2)
    run.leave("error", 0, 1)
    run.seated(0, 1)
    run.kill(1)
    run.leave("error", 0)
    with pytest.raises(CommError, match="formed anew 1 times, as --reset-limit allows"):
        run.step_until(lambda: False)


def test_a_slot_that_is_taken_away_before_its_worker_has_come_is_freed(begin) -> None:
    run = begin({"localhost": 2}, Limits(1, 5, 2))
    run.seated(0, 1)
    run.hosts = {"localhost": 3}
    run.step_until(lambda: 2 in run.driver.workers)
    run.hosts = {"localhost": 2}
    run.step_until(lambda: 2 not in run.driver.workers)
    assert not run[0].update


def test_workers_that_form_no_group_may_end(begin) -> None:
    run = begin({"localhost": 2}, Limits(1, 2, 2), command=["true"])
    assert run.driver.run().failures == []
    assert run.driver.finished


def test_an_exit_code_of_the_script_ends_the_run(begin) -> None:
    run = begin({"localhost": 2}, Limits(1, 2, 2), command=["sh", "-c", "exit 7"])
    outcome = run.driver.run()
    assert 7 in [failure.exit_code for failure in outcome.failures]
    assert run.driver.workers == {}


REPORTS = """
if [ $GOSSAMER_ELASTIC_WORKER = 1 ]; then kill -15 $$; fi
sleep 0.3
now=$(date +%s%N)
echo '{"message": {"message": "", "extraInfo": {"timestamp": "1", "time_ns": '$now'}}}' > $TORCHELASTIC_ERROR_FILE
exit 1
"""


def test_a_worker_that_was_terminated_before_the_error_of_another_one_is_the_cause(begin) -> None:
    run = begin({"localhost": 2}, Limits(1, 2, 2), command=["sh", "-c", REPORTS])
    for worker in run.driver.workers.values():
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert describe(run.driver.run().failures).startswith("rank 1 was killed by signal 15 (SIGTERM)")


def test_a_worker_that_the_driver_terminates_is_not_the_cause(begin) -> None:
    run = begin(
        {"localhost": 2}, Limits(1, 2, 2), command=["sh", "-c", REPORTS.replace("kill -15 $$", "sleep 100")]
    )
    assert describe(run.driver.run().failures).startswith("rank 0 failed with exit code 1")


def test_a_worker_whose_driver_has_ended_says_so(begin, capfd) -> None:
    run = begin({"localhost": 1}, Limits(1, 1, 1))
    (seat,) = run.seated(0)
    del seat
    run.driver.board._server = run.driver.board._store = None  # as the end of its process does
    until = time.monotonic() + 10
    while not run[0].broken and time.monotonic() < until:
        time.sleep(0.05)
    assert "worker 0 (rank 0 of 1) has lost the driver of this run" in run[0].broken
    with pytest.raises(CommError, match="has lost the driver"):
        run[0].leave("error", skip_sync=False)
    assert capfd.readouterr().err.count(run[0].broken) == 1, "once, as both have the same stderr"
