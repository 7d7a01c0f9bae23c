"""A Work's answers while it runs, when it is done and when it failed; timeouts of calls, waits and groups."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions, BroadcastOptions
from torch.torch_version import TorchVersion

import gossamer
from tests.backend.jobs import TESTED, backend_of, named_ranks, options, run_group, values

LostError = RuntimeError if TESTED == "gloo" else gossamer.CommError
# Torch before 2.13 cannot convert a work's exception for Python.
HANDS_OVER_EXCEPTIONS = TorchVersion(torch.__version__) >= (2, 13)
SLACK_S = 1.5  # of a loaded machine, beyond the timeout asked for
names_ranks = pytest.mark.skipif(TESTED == "gloo", reason="Gloo does not name the rank")


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def fails_within(call, timeout_s: float) -> Exception:
    """The error of a call that must fail after its timeout, not before and not much later."""
    begun = time.monotonic()
    with pytest.raises(LostError) as caught:
        call()
    taken = time.monotonic() - begun
    assert taken < timeout_s + SLACK_S, f"took {taken:.2f} s"
    assert taken > 0.8 * timeout_s, f"gave up after {taken:.2f} s"
    return caught.value


def test_a_finished_work_is_completed_successful_and_holds_its_outputs():
    def body(group):
        tensor = values(group.rank(), (5,))
        outputs = [torch.empty(5), torch.empty(5)]
        one = group.allreduce([tensor])
        many = group.allgather([outputs], [values(group.rank(), (5,))])
        none = group.barrier()
        for work, results in ((one, [tensor]), (many, outputs), (none, [])):
            assert work.wait() is True
            assert work.is_completed()
            assert work.is_success()
            if HANDS_OVER_EXCEPTIONS:
                assert work.exception() is None
            future = work.get_future()
            assert future.done()
            for held in (work.result(), future.wait(), future.value()):
                assert len(held) == len(results)
                assert all(a.data_ptr() == b.data_ptr() for a, b in zip(held, results, strict=True))
            assert work.wait() is True  # again
            work.synchronize()

    run_group(2, body)


def test_a_work_is_not_completed_before_the_last_rank_comes():
    gate = threading.Event()

    def body(group):
        tensor = torch.ones(3)
        if group.rank() == 2:
            gate.wait()
        work = group.allreduce([tensor])
        if group.rank() == 0:
            future = work.get_future()
            time.sleep(0.1)
            assert not work.is_completed()
            assert not future.done()
            gate.set()
        work.wait()
        assert work.is_completed()
        return tensor.tolist()

    assert run_group(3, body) == [[3.0] * 3] * 3


def test_callbacks_of_a_future_run_once_with_the_result():
    def body(group):
        called = []
        tensor = values(group.rank(), (1000,))
        future = group.allreduce([tensor]).get_future()
        halved = future.then(lambda done: called.append(1) or done.value()[0] / 2)
        result = halved.wait()
        return called, result, tensor

    for called, result, tensor in run_group(3, body):
        assert called == [1]
        assert torch.equal(result, tensor / 2)
        assert torch.equal(tensor, sum(values(rank, (1000,)) for rank in range(3)))


def test_the_source_of_a_receive_is_known_and_of_other_works_is_an_error():
    def body(group):
        tensor = torch.ones(2)
        reduced = group.allreduce([tensor])
        reduced.wait()
        with pytest.raises(RuntimeError):
            reduced._source_rank()
        if group.rank() == 0:
            assert group.send([tensor], 1, 0).wait()
            return None
        work = group.recv([tensor], 0, 0)
        assert work.wait()
        return work._source_rank()

    assert run_group(2, body)[1] == 0


def run_without(missing, size, body, **settings):
    """run_group, but the missing ranks make no call. They are present until the others' calls have ended."""
    ended = threading.Barrier(size)

    def on_rank(group):
        try:
            return None if group.rank() in missing else body(group)
        finally:
            ended.wait(30)

    return run_group(size, on_rank, **settings)


@names_ranks
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_call_whose_rank_never_comes_fails_within_its_timeout_and_names_that_rank(missing):
    def body(group):
        work = group.allreduce([torch.ones(3)], options(AllreduceOptions, timeout=seconds(0.5)))
        error = fails_within(work.wait, 0.5)
        assert work.is_completed()
        assert not work.is_success()
        if HANDS_OVER_EXCEPTIONS:
            assert isinstance(work.exception(), LostError)
        with pytest.raises(LostError):
            work.wait()
        with pytest.raises(LostError):
            work.get_future().wait()
        return error

    for rank, error in enumerate(run_without([missing], 3, body)):
        if rank != missing:
            assert named_ranks(error) - {rank} == {missing}, str(error)


@names_ranks
@pytest.mark.parametrize("call", ["broadcast", "barrier", "recv", "recv_anysource", "allgather", "send"])
def test_every_kind_of_call_keeps_the_timeout_of_its_group_and_names_who_is_missing(call):
    def body(group):
        group.set_timeout(seconds(0.5))
        tensor = torch.ones(2_000_000)  # too large to be sent before the receiver comes
        if call == "broadcast":
            work = group.broadcast([tensor], options(BroadcastOptions, rootRank=1))
        elif call == "barrier":
            work = group.barrier(BarrierOptions())
        elif call == "recv":
            work = group.recv([tensor], 1, 0)
        elif call == "recv_anysource":
            work = group.recv_anysource([tensor], 0)
        elif call == "send":
            work = group.send([tensor], 1, 0)
        else:
            work = group.allgather([[torch.empty(2_000_000) for _ in range(3)]], [tensor])
        return fails_within(work.wait, 0.5)

    for rank, error in enumerate(run_without([1], 3, body)):
        if rank != 1 and call != "recv_anysource":  # this one may wait for any rank
            assert named_ranks(error) - {rank} == {1}, str(error)


def test_the_timeout_given_at_construction_is_that_of_its_calls():
    def body(group):
        fails_within(group.allreduce([torch.ones(1)]).wait, 0.5)

    run_without([1], 2, body, timeout_s=0.5)


@pytest.mark.skipif(TESTED == "gloo", reason="Gloo's work ends with its wait")
def test_a_wait_gives_up_after_its_own_timeout_and_the_work_goes_on():
    gate = threading.Event()

    def body(group):
        tensor = torch.ones(3)
        if group.rank() == 1:
            gate.wait()
        work = group.allreduce([tensor])
        if group.rank() == 0:
            fails_within(lambda: work.wait(seconds(0.3)), 0.3)
            assert not work.is_completed()
            gate.set()
        work.wait()
        return tensor.tolist()

    assert run_group(2, body) == [[2.0] * 3] * 2


@pytest.mark.parametrize("everyone", [True, False], ids=["wait_all_ranks", "first"])
def test_monitored_barrier_names_the_ranks_that_did_not_come(everyone):
    def body(group):
        timeout_s = 0.5 if group.rank() == 0 else 1.5

        def call():
            backend_of(group).monitored_barrier(seconds(timeout_s), wait_all_ranks=everyone)

        begun = time.monotonic()
        with pytest.raises(LostError) as caught:
            call()
        assert time.monotonic() - begun < timeout_s + SLACK_S
        return caught.value

    error = run_without([1, 3], 4, body)[0]
    missing = named_ranks(error) - {0}
    assert missing == {1, 3} if everyone else missing and missing <= {1, 3}, str(error)


def test_monitored_barrier_through_the_process_group_passes_when_all_come():
    def body(group):
        for everyone in (True, False):
            group.monitored_barrier(seconds(20), everyone)
        return "passed"

    assert run_group(3, body) == ["passed"] * 3


def test_sequence_numbers_count_the_collectives_and_agree_on_all_ranks():
    """The backend answers, because a ProcessGroup answers only for backends that torch knows by name."""

    def body(group):
        backend = backend_of(group)
        backend._set_sequence_number_for_group()
        begun = backend._get_sequence_number_for_group()
        counts = []
        for _ in range(3):
            group.allreduce([torch.ones(1)]).wait()
            group.barrier().wait()
            counts.append(backend._get_sequence_number_for_group() - begun)
        return counts

    assert run_group(3, body) == [[2, 4, 6]] * 3
