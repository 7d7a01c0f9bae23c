# Hooks for stock torch DDP let backward go on: nothing blocks in a hook.

import ctypes
import sys
import threading
import time

import pytest
import torch

from gossamer import hooks
from tests.support.models import batches, shard
from tests.support.stock_ddp import Training, run_ddp


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
        training.run(range(2))  # connects, and makes the buckets anew
        first = len(calls)
        loss = training.ddp(shard(batches(1)[0], comm)).square().mean()
        if comm.rank == 1:
            assert all_queued.wait(20), "a hook has waited for the rank that came late"
        loss.backward()
        training.state.close()
        return len(calls) - first

    assert min(run_ddp(2, body)) > 1


def slowly(x):
    """Returns x; its backward spends a third of a second inside torch."""
    matrix = torch.eye(1200)
    y = x * matrix
    for _ in range(6):
        y = y @ matrix
    return y.mean()


def test_native_path_sends_every_bucket_while_a_thread_of_the_process_keeps_the_gil():
    """Ranks and that thread share one process. A try fails if a rank is in Python when the thread takes the GIL."""
    sleep_us = ctypes.PyDLL(None).usleep  # a call that does not release the GIL
    started = threading.Barrier(3)
    comms, expected, kept = {}, {}, []

    def sent():
        return all(comms[rank].bytes_sent >= expected[rank] for rank in comms)

    def keep_the_gil():
        started.wait(20)
        time.sleep(0.05)  # both ranks are out of the hook below
        before, end_s = sys.getswitchinterval(), time.monotonic() + 4
        sys.setswitchinterval(1000)
        try:
            while not sent() and time.monotonic() < end_s:
                sleep_us(5000)
            kept.append(sent())
        finally:
            sys.setswitchinterval(before)

    def body(group, comm):
        training = Training(group, comm, hooks.bytegrad, native=True)
        training.run(range(3))
        before = comm.bytes_sent
        training.step(batches(4)[3])
        a_step, comms[comm.rank] = comm.bytes_sent - before, comm
        for _ in range(5):
            expected[comm.rank] = comm.bytes_sent + a_step
            if comm.rank == 0:
                keeper = threading.Thread(target=keep_the_gil)
                keeper.start()
            training.optimizer.zero_grad()
            result = slowly(training.ddp(shard(batches(1)[0], comm)).square().mean())
            result.register_hook(lambda _: started.wait(20) and None)
            result.backward(retain_graph=True)  # torch needs the GIL to free what Python has seen
            if comm.rank == 0:
                keeper.join()
        training.state.close()

    run_ddp(2, body)
    assert any(kept), "no bucket is sent while another thread has the GIL"
