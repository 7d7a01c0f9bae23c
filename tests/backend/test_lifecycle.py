"""A backend's end: abort, shutdown, use afterwards, a fork, peers that left, and what is left behind."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions

import gossamer
from tests import ROOT
from tests.backend import jobs
from tests.backend.jobs import TESTED, backend_of, make_backend, named_ranks, options, run_group, values
from tests.support.ranks import run_threads

WAITS = {
    "allreduce": lambda group: group.allreduce([torch.ones(3)]),
    "large allreduce": lambda group: group.allreduce([torch.ones(1_000_000)]),
    "barrier": lambda group: group.barrier(),
    "broadcast": lambda group: group.broadcast([torch.ones(3)], options(BroadcastOptions, rootRank=1)),
    "recv": lambda group: group.recv([torch.ones(3)], 1, 0),
    "recv from any": lambda group: group.recv_anysource([torch.ones(3)], 0),
}


no_gloo = pytest.mark.skipif(TESTED == "gloo", reason="Gloo's abort wakes nobody, its shutdown ends nothing")


def raises_soon(work, seconds: float = 2.0) -> Exception:
    begun = time.monotonic()
    with pytest.raises(gossamer.CommError) as caught:
        work.wait()
    assert time.monotonic() - begun < seconds
    return caught.value


@no_gloo
@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", WAITS)
def test_abort_wakes_a_waiting_call_with_an_error(call):
    """Rank 1 never comes; on rank 0 another thread aborts."""
    done = threading.Event()

    def body(group):
        if group.rank() == 1:
            done.wait(20)
            return None
        work = WAITS[call](group)
        threading.Timer(0.3, group.abort).start()
        begun = time.monotonic()
        error = raises_soon(work)
        done.set()
        assert time.monotonic() - begun > 0.2
        with pytest.raises(gossamer.CommError):
            group.allreduce([torch.ones(1)]).wait()
        return error

    assert "abort" in str(run_group(2, body)[0]).lower()


@no_gloo
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("end", "timeout_s"), [("abort", 20), ("shutdown", 1)])
def test_ranks_that_wait_for_one_that_aborted_or_shut_down_get_an_error_that_names_it(end, timeout_s):
    """An abort wakes them. A shutdown only makes a rank absent, because what it did before must last."""

    def body(group):
        if group.rank() == 1:
            time.sleep(0.3)
            getattr(group, end)()
            return None
        return raises_soon(group.allreduce([torch.ones(3)]))

    for rank, error in enumerate(run_group(3, body, timeout_s=timeout_s)):
        if rank != 1:
            assert named_ranks(error) - {rank} == {1}, str(error)


@no_gloo
@pytest.mark.parametrize("hosts", [None, [[0, 1], [2, 3]]], ids=["flat", "hosts"])
def test_a_new_timeout_reaches_the_connections_of_encoded_rows(hosts):
    """All ranks have agreed on an encoded sum, and the last one is late in the sum itself."""
    size, old_s, new_s = 4, 30, 0.3
    met = threading.Barrier(size)
    chosen = gossamer.Int8().native
    settings = gossamer.Options(gossamer.Int8(), hosts=hosts)

    def body(group):
        group.barrier().wait()
        group.set_timeout(timedelta(seconds=new_s))
        begun = time.monotonic()
        if group.rank() == size - 1:
            met.wait()
            return "late"
        try:
            with pytest.raises(gossamer.CommError) as caught:
                gossamer._C.all_reduce(backend_of(group).comm, chosen, torch.ones(100_000), 1.0)
            assert time.monotonic() - begun < old_s / 3
        finally:
            met.wait()
        return str(caught.value)

    texts = run_group(size, body, kind=settings, timeout_s=old_s)
    assert texts.pop() == "late"
    assert any("imed out after" in text and {size - 1} <= named_ranks(text) for text in texts), texts


@pytest.mark.timeout(60)
def test_what_was_done_before_a_peer_shut_down_is_not_lost_by_it():
    """A rank may leave as soon as its own part is done, even if the others are slow to read."""

    def body(group):
        tensors = [values(group.rank() + i, (50_000,)) for i in range(20)]
        for tensor in tensors:
            group.allreduce([tensor]).wait()
        group.barrier().wait()
        if group.rank() == 0:
            group.shutdown()
        time.sleep(0.1 * group.rank())
        return tensors

    for tensors in run_group(3, body):
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, sum(values(rank + i, (50_000,)) for rank in range(3)))


@no_gloo
@pytest.mark.parametrize("call", WAITS)
@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_a_backend_is_refused_after_its_end_and_may_be_ended_twice(call, end):
    def body(group):
        group.barrier().wait()
        getattr(group, end)()
        getattr(group, end)()
        backend_of(group).shutdown()
        with pytest.raises((gossamer.CommError, gossamer.ConfigError), match=r"(?i)shut ?down|abort|closed"):
            WAITS[call](group).wait()

    run_group(2, body, timeout_s=10)


@no_gloo
def test_nothing_succeeds_after_an_abort():
    def body(group):
        group.allreduce([torch.ones(1)]).wait()
        if group.rank() == 0:
            group.abort()
        return str(raises_soon(group.allreduce([torch.ones(1)])))

    for error in run_group(2, body):
        assert named_ranks(error) >= {0}, error
        assert "its group was aborted" in error


@no_gloo
def test_groups_may_be_made_one_after_the_other_in_the_same_store():
    store = dist.HashStore()

    def body(rank: int) -> list[float]:
        sums = []
        for _ in range(10):
            backend = make_backend(TESTED, store, rank, 4)
            tensor = torch.ones(1)
            backend.allreduce([tensor]).wait()
            sums.append(tensor.item())
        return sums

    assert run_threads(4, body) == [[4.0] * 10] * 4


def test_one_group_goes_on_when_another_of_the_same_ranks_has_ended():
    gone = threading.Barrier(2)

    def end(group):
        group.allreduce([torch.ones(1)]).wait()
        group.abort()

    def body(group):
        if group.rank() == 0:
            run_group(2, end)
        gone.wait(30)
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()
        return tensor.tolist()

    assert run_group(2, body) == [[2.0, 2.0]] * 2


def fork_in_a_process() -> None:
    """Run in a process of its own: both ranks are its threads, and then it forks."""
    groups = run_group(2, lambda group: group.barrier().wait() and group)
    child = os.fork()
    if child == 0:
        refused = 0
        for group in groups:
            for call in (
                group.allreduce,
                lambda tensors, group=group: group.recv(tensors, 1 - group.rank(), 0),
            ):
                try:
                    call([torch.ones(1)]).wait()
                except gossamer.GossamerError as error:
                    refused += "fork" in str(error)
            backend_of(group).shutdown()
            backend_of(group).abort()
        os._exit(0 if refused == 4 else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def again(rank: int) -> list[float]:
        tensor = torch.ones(2)
        groups[rank].allreduce([tensor]).wait()
        return tensor.tolist()

    print(json.dumps({"child": status, "parent": run_threads(2, again)}))


def leave_nothing_in_a_process() -> None:
    """Run in a process of its own: open files, threads and shared mappings after 1 and after 30 groups."""

    def held() -> list[int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        shared = sum("memfd:" in line or "/dev/shm" in line for line in maps.splitlines())
        return [len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task")] + [shared]

    def body(group) -> None:
        tensor = torch.ones(300_000)
        group.allreduce([tensor]).wait()
        group.barrier().wait()
        group.shutdown()

    jobs.keep_alive = lambda backends: None
    counts = []
    for round_number in range(30):
        run_group(3, body)
        if round_number in (0, 29):
            counts.append(held())
    print(json.dumps(counts))


def end_while_callbacks_run_in_a_process() -> None:
    """Run in a process of its own, which ends while threads of the backend are inside Python, and destroys no group."""
    attached, begun = threading.Barrier(3), threading.Barrier(5)

    class EndsSlowly:
        def __del__(self) -> None:
            time.sleep(1)

    def callback(_future: torch.futures.Future) -> None:
        begun.wait()
        time.sleep(0.5)  # asks for the GIL while the interpreter ends

    def body(group):
        last = group.rank() == 2  # begins late: a callback of a work that is done would run here
        if last:
            attached.wait()
        sum_ = group.allreduce([torch.ones(2)])
        if last:
            for other in (0, 1):
                group.send([torch.zeros(4)], other, 0)
            return group
        for work in (sum_, group.recv([torch.zeros(4)], 2, 0)):
            work.get_future().then(callback)
        attached.wait()
        return group

    jobs.keep_alive([*run_group(3, body), EndsSlowly()])
    begun.wait()
    print(json.dumps("ended"))


def in_a_process(function: str) -> object:
    code = f"from tests.backend import test_lifecycle; test_lifecycle.{function}()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(TESTED == "gloo", reason="Gloo hangs in the child")
def test_a_backend_refuses_to_work_in_a_forked_child_and_goes_on_in_the_parent():
    assert in_a_process("fork_in_a_process") == {"child": 0, "parent": [[2.0, 2.0]] * 2}


@no_gloo
def test_a_process_may_end_while_threads_of_its_groups_are_inside_python():
    assert in_a_process("end_while_callbacks_run_in_a_process") == "ended"


def test_groups_that_are_gone_leave_no_open_files_threads_or_mappings():
    first, last = in_a_process("leave_nothing_in_a_process")
    assert last == first


@pytest.mark.skipif(TESTED == "gloo", reason="Gloo's threads end with the process")
def test_a_work_that_outlives_its_group_keeps_no_thread_of_it():
    def mail_threads():
        names = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
        return names.count("gossamer-mail")

    before = mail_threads()
    store = dist.HashStore()

    def body(rank):
        backend = make_backend(TESTED, store, rank, 2)
        x = torch.zeros(4)
        work = backend.send([x], 1, 0) if rank == 0 else backend.recv([x], 0, 0)
        work.wait()
        return work

    works = run_threads(2, body)
    gc.collect()
    until = time.monotonic() + 10
    while mail_threads() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert mail_threads() <= before  # a thread of an earlier test may have ended meanwhile
    assert all(work.is_completed() for work in works)
