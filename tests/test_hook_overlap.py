# Hooks for stock torch DDP let backward go on: nothing blocks in a hook, and the native path needs no GIL.

import ctypes
import sys
import threading

import pytest
import torch

from gossamer import hooks
from models import batches, shard
from stock_ddp import Training, run_ddp


@pytest.mark.parametrize("name", ["bytegrad", "powersgd"])
def test_no_hook_waits_for_another_rank(name):
    all_queued = threading.Event()  # by rank 0, before rank 1 has begun its backward

    def body(group, comm):
        calls = []

        def counted(state, bucket):
            future = getattr(hooks, name)(state, bucket)
            calls.append(bucket.index())
            if bucket.is_last() and comm.rank == 0 and len(calls) > first:
                all_queued.set()
            return future

        first = sys.maxsize
        training = Training(group, comm, counted)
        training.run(range(2))  # connected, and the buckets made anew
        first = len(calls)
        loss = training.ddp(shard(batches(1)[0], comm)).square().mean()
        if comm.rank == 1:
            assert all_queued.wait(20), "a hook has waited for the rank that came late"
        loss.backward()
        training.state.close()
        return len(calls) - first

    assert min(run_ddp(2, body)) > 1


def test_native_path_sends_its_buckets_while_another_thread_keeps_the_gil():
    inside = [threading.Event(), threading.Event()]
    sent = []

    def keep_gil(comms):
        for event in inside:
            event.wait()  # gets the GIL when both ranks have let go of it, in backward
        ctypes.PyDLL(None).usleep(1_500_000)
        sent.extend(comm.bytes_sent for comm in comms)

    def body(group, comm):
        training = Training(group, comm, hooks.bytegrad, native=True)
        training.run(range(2))
        comms[comm.rank] = comm
        before = comm.bytes_sent
        training.run(range(1))
        each = comm.bytes_sent - before
        meet.wait()
        if comm.rank == 0:
            sys.setswitchinterval(60)
            keeper.start()
        meet.wait()
        loss = training.ddp(shard(batches(1)[0], comm)).square().mean()
        one = torch.ones(())
        inside[comm.rank].set()
        # backward() itself, without the operation before it that would let go of the GIL too early.
        run_backward = torch.autograd.Variable._execution_engine.run_backward
        run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        keeper.join()
        training.state.close()
        return before + 2 * each

    comms, meet = [None, None], threading.Barrier(2)
    keeper = threading.Thread(target=keep_gil, args=(comms,))
    interval = sys.getswitchinterval()
    try:
        assert run_ddp(2, body) == sent
    finally:
        sys.setswitchinterval(interval)
