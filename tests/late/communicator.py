"""Run by test_late.py. C10dCommunicator on a device whose work is late, over a backend that works as NCCL does."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from gossamer import _C
from gossamer.comm import NamedOptions
from tests.support import late_device
from tests.support.ranks import run_threads


@pytest.mark.parametrize("which", ["none", "main", "side", "all"])
def test_operations_run_on_the_callers_stream_and_return_no_work(which):
    with late_device.late(which) as native:
        backend = native.Backend(0, 2)
        comm = gs.comm.from_backend(backend, device="late:0")
        x = torch.arange(4.0).to("late")
        comm.all_reduce(x).wait()
        gathered = torch.empty(8, device="late")
        comm.all_gather(gathered, x).wait()
        scattered = torch.empty(2, device="late")
        comm.reduce_scatter(scattered, x).wait()
        swapped = torch.empty(4, device="late")
        comm.all_to_all(swapped, x).wait()
        comm.broadcast(x).wait()
        x.add_(1)
        assert x.tolist() == [1.0, 3.0, 5.0, 7.0]
        assert gathered.tolist() == 2 * [0.0, 2.0, 4.0, 6.0]
        assert scattered.tolist() == [0.0, 4.0]
        assert swapped.tolist() == [0.0, 2.0, 0.0, 2.0]
        assert backend.own_stream_calls == 0


def test_dropping_a_communicator_right_after_an_operation_keeps_its_result():
    with late_device.late("all") as native:
        before = native.shutdowns()
        comm = late_device.communicator()
        x = torch.arange(4.0).to("late")
        comm.all_reduce(x).wait()
        del comm
        assert x.tolist() == [0.0, 2.0, 4.0, 6.0]
        assert native.shutdowns() == before + 1


def test_dropping_a_communicator_leaves_the_backend_of_another_owner_alone():
    with late_device.late("none") as native:
        backend = native.Backend(0, 2)
        before = native.shutdowns()
        comm = gs.comm.from_backend(backend, device="late:0")
        del comm
        x = torch.ones(2, device="late")
        gs.comm.from_backend(backend, device="late:0").all_reduce(x).wait()
        assert native.shutdowns() == before
        assert x.tolist() == [2.0, 2.0]


def test_after_a_failure_the_backend_is_destroyed_without_waiting_for_what_is_in_flight():
    with late_device.late("all") as native:
        before = native.shutdowns()
        comm = late_device.communicator()
        x = torch.ones(4, device="late")
        comm.all_reduce(x).wait()
        comm.announce_failure()
        del comm
        assert x.isnan().all()
        assert native.shutdowns() == before


def test_the_host_waits_for_an_operation_on_the_device_until_its_peer_has_come():
    with late_device.late("all"):
        first, second = late_device.wired_pair(20)
        x, y = torch.ones(4, device="late"), torch.full((4,), 2.0)
        late = threading.Timer(0.4, lambda: second.all_reduce(y).wait())
        late.start()
        begin = time.monotonic()
        first.all_reduce(x).wait()
        assert time.monotonic() - begin > 0.3
        late.join()
        assert x.tolist() == y.tolist() == [3.0] * 4


@pytest.mark.parametrize("announces", [True, False], ids=["announced", "silent"])
def test_an_operation_whose_peer_does_not_come_is_aborted_on_the_device(announces):
    with late_device.late("all"):
        first, second = late_device.wired_pair(20 if announces else 0.3)
        x = torch.ones(4, device="late")
        if announces:
            threading.Timer(0.3, second.announce_failure, ["left the room"]).start()
        begin = time.monotonic()
        reason = "rank 1 has left the room" if announces else "it timed out after 300 ms"
        with pytest.raises(gs.CommError, match=f"all_reduce of 16 bytes failed on rank 0/2: {reason}"):
            first.all_reduce(x).wait()
        assert time.monotonic() - begin < 10
        assert x.isnan().all(), "an aborted operation leaves anything"


def test_an_exact_sum_of_a_view_that_is_not_aligned_has_the_message_of_one_that_is():
    with late_device.late("all"):
        first, second = late_device.wired_pair()
        numel, results = 1024, [None, None]

        def of_cpu():
            results[1] = gs.all_reduce(torch.arange(numel) * 2.0, deterministic=True, group=second)

        other = threading.Thread(target=of_cpu)
        other.start()
        x = torch.arange(-1.0, numel).to("late")[1:]
        assert x.data_ptr() % 16
        results[0] = gs.all_reduce(x, deterministic=True, group=first)
        other.join()
        assert results[0].tolist() == results[1].tolist() == [3.0 * i for i in range(numel)]


def test_a_rank_without_rows_takes_part_in_named_operations():
    """Horovod's allgather and alltoall, where some ranks have nothing."""

    def body(named, rank):
        def submit(kind, rows, **given):
            (operation,) = named.submit(
                kind, [torch.full((rows, 3), float(rank), device="late")], [kind], **given
            )
            operation.wait()
            return operation.output.tolist()

        gathered = submit("allgather", 2 * rank)
        assert gathered == [[1.0] * 3] * 2
        assert submit("alltoall", 2 * rank, splits=[rank, rank]) == [[1.0] * 3]
        assert submit("broadcast", 0, root=1) == []

    def run(rank):
        wire = dist.ProcessGroupGloo(dist.PrefixStore("wire", store), rank, 2, timedelta(seconds=30))
        comm = gs.comm.from_backend(native.Wired(wire), device="late:0", store=store, name="late")
        channel = _C.GossamerBackend(dist.PrefixStore("channel", store), rank, 2, timedelta(seconds=30))
        settings = vars(NamedOptions()).copy()
        del settings["by_hosts"]
        named = _C.NamedCollectives(channel, {"late": comm}, [0, 1], **settings)
        try:
            body(named, rank)
        finally:
            named.shutdown()

    store = dist.HashStore()
    with late_device.late("none") as native:
        run_threads(2, run)
