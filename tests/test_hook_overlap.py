# Hooks for stock torch DDP let backward go on: nothing blocks in a hook.

import sys
import threading

import pytest

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
