"""Run by test_late.py. C10dCommunicator on a device whose work is late, over a backend that works as NCCL does."""

import pytest
import torch

import gossamer as gs
from tests.support import late_device


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
