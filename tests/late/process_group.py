"""Run by test_late.py. The backend "gossamer" with tensors of a device whose work is late: on which streams it works.

Rank 0 of two ranks is tested. Rank 1 is there for the meeting of the CPU group only, for the device's own backend takes
all ranks for equal: see tests/cpp/device/backend.h.
"""

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs
from gossamer import _C
from gossamer.comm.backend import connect_codec
from tests.late.engine import Layer
from tests.support import late_device

SIZE = 2
LATE = "late:0"
WHICH = ["none", "main", "side", "all"]
OPS = dist.ReduceOp
NUMEL = 300


def connect(store, rank, size, timeout, hosts, device):
    return (
        connect_codec(store, rank, size, timeout, hosts, device)
        if device.type == "cpu"
        else late_device.communicator()
    )


def make_group(options: Any = None, **given: Any) -> SimpleNamespace:
    """Returns the process group of rank 0, its backend, and the backends that take the device's tensors exactly."""
    native, store, made, exact = late_device.load(), dist.HashStore(), {}, []
    options = gs.Options(**given) if given else options

    def exactly(store, rank, size, timeout, device):
        exact.append(native.Backend(rank, size))
        return exact[-1]

    def make(rank):
        place = store, rank, SIZE, timedelta(seconds=30)
        made[rank] = _C.CodecBackend(*place, options, connect) if options else _C.GossamerBackend(*place)
        made[rank].connect_elsewhere("late", exactly)

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    group = dist.ProcessGroup(store, 0, SIZE)
    for device in ("cpu", "late"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, made[0])
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return SimpleNamespace(group=group, backend=made[0], exact=exact, other=made[1])


@pytest.fixture(scope="module")
def coded():
    return make_group(codec=gs.Int8(), gather_codec=gs.BF16(), min_bytes=0)


def filled(value, numel=NUMEL, dtype=torch.float32):
    return torch.zeros(numel, dtype=dtype, device=LATE).fill_(value)


def options(kind, *, op=OPS.SUM, async_op=True):
    given = kind()
    given.asyncOp = async_op
    if hasattr(given, "reduceOp"):
        given.reduceOp = op
    return given


def waited(work):
    if work is not None:
        work.wait()


def all_reduce(group, value, async_op=True):
    x = filled(value)
    waited(group.allreduce([x], options(dist.AllreduceOptions, async_op=async_op)))
    return x


def reduce_scatter(group, value, async_op=True):
    out, x = filled(0), filled(value, SIZE * NUMEL)
    waited(group._reduce_scatter_base(out, x, options(dist.ReduceScatterOptions, async_op=async_op)))
    return out


def reduce_scatter_list(group, value, async_op=True):
    out, parts = filled(0), [filled(value) for _ in range(SIZE)]
    waited(group.reduce_scatter([out], [parts], options(dist.ReduceScatterOptions, async_op=async_op)))
    return out


def all_gather(group, value, async_op=True):
    out, x = filled(0, SIZE * NUMEL), filled(value * SIZE)
    waited(group._allgather_base(out, x, options(AllgatherOptions, async_op=async_op)))
    return out


def all_gather_list(group, value, async_op=True):
    outs, x = [filled(0) for _ in range(SIZE)], filled(value * SIZE)
    waited(group.allgather([outs], [x], options(AllgatherOptions, async_op=async_op)))
    return torch.stack([out.cpu() for out in outs])


ENCODED = [all_reduce, reduce_scatter, reduce_scatter_list, all_gather, all_gather_list]


def run(call, coded, which, seed=lambda native: None, **more):
    """Calls on a device that is late from now on. Returns whether each element is right, and the number of waits."""
    with late_device.late("none") as native:
        call(coded.group, 1.0, **more)  # memory that is kept is there
        native.synchronize()
        native.set_late(late_device.LATENESS[which])
        native.drop_wait(-1)
        seed(native)
        x = call(coded.group, 3.0, **more)
        if x.device.type == "late":
            x.add_(1)
        else:
            x = x + 1
        right = torch.allclose(x.cpu(), torch.full_like(x.cpu(), 7.0), rtol=0.02)
        return right, native.waits()


@pytest.mark.parametrize("async_op", [True, False])
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("call", ENCODED, ids=lambda call: call.__name__)
def test_an_encoded_operation_begins_after_the_callers_stream_and_ends_before_it_goes_on(
    coded, call, which, async_op
):
    before = 0 if coded.backend.device_comm is None else coded.backend.device_comm.bytes_sent
    right, waits = run(call, coded, which, async_op=async_op)
    assert right
    assert waits == 2
    assert coded.backend.device_comm.bytes_sent > before


@pytest.mark.parametrize("async_op", [True, False])
@pytest.mark.parametrize("call", ENCODED, ids=lambda call: call.__name__)
def test_both_waits_of_an_operation_are_needed(coded, call, async_op):
    for number in range(2):
        runs = [
            run(
                call, coded, which, lambda native, number=number: native.drop_wait(number), async_op=async_op
            )[0]
            for which in ("main", "side")
        ]
        assert not all(runs), number


@pytest.mark.parametrize("recorded", [True, False])
def test_a_tensor_that_is_dropped_before_the_groups_stream_has_read_it_must_be_recorded(coded, recorded):
    with late_device.late("none") as native:
        reduce_scatter(coded.group, 1.0)
        native.synchronize()
        native.set_late(late_device.LATENESS["side"])
        native.drop_records(not recorded)
        out, x = filled(0), filled(3.0, SIZE * NUMEL)
        work = coded.group._reduce_scatter_base(out, x, options(dist.ReduceScatterOptions))
        del x  # the main stream, which made it, overwrites it now
        work.wait()
        assert torch.allclose(out.cpu(), torch.full((NUMEL,), 6.0), rtol=0.02) == recorded


@pytest.mark.parametrize("which", WHICH)
def test_operations_that_nobody_waits_for_at_once_keep_their_order_and_their_memory(coded, which):
    with late_device.late(which):
        tensors = [filled(float(i + 1), 100 + 50 * i) for i in range(6)]
        works = [coded.group.allreduce([x], options(dist.AllreduceOptions)) for x in tensors]
        again = coded.group.allreduce([tensors[0]], options(dist.AllreduceOptions, async_op=False))
        assert again is None
        for work in reversed(works):
            work.wait()
        for i, x in enumerate(tensors):
            want = (i + 1) * (4 if i == 0 else 2)
            assert torch.allclose(x.cpu(), torch.full((x.numel(),), float(want)), rtol=0.03), i


def test_wait_keeps_the_stream_and_not_the_host(coded):
    with late_device.late("all"):
        x = filled(3.0)
        work = coded.group.allreduce([x], options(dist.AllreduceOptions))
        work.wait()
        assert not work.is_completed()
        assert work.result()[0] is not None
        with pytest.raises(gs.CommError, match=r"ALLREDUCE: not complete after 20 ms of waiting"):
            work.wait(timedelta(milliseconds=20))
        x.cpu()
        assert work.is_completed()
        assert work.is_success()
        work.wait(timedelta(seconds=1))


@pytest.mark.parametrize("which", WHICH)
def test_a_future_and_what_follows_it_are_ordered_by_events(coded, which):
    def doubled(seed=lambda native: None):
        with late_device.late("none") as native:
            all_reduce(coded.group, 1.0)
            native.synchronize()
            native.set_late(late_device.LATENESS[which])
            native.drop_wait(-1)
            seed(native)
            x = filled(3.0)
            future = coded.group.allreduce([x], options(dist.AllreduceOptions)).get_future()
            after = future.then(lambda done: done.value()[0].mul_(2))
            return torch.allclose(after.wait().cpu(), torch.full((NUMEL,), 12.0), rtol=0.02), native.waits()

    right, waits = doubled()
    assert right
    assert waits == 3
    if which == "side":
        assert not doubled(lambda native: native.drop_wait(waits - 1))[0]


def test_a_future_holds_what_torch_expects(coded):
    with late_device.late("none"):
        x, outs = filled(1.0), [filled(0) for _ in range(SIZE)]
        [summed] = coded.group.allreduce([x], options(dist.AllreduceOptions)).get_future().wait()
        assert summed.data_ptr() == x.data_ptr()
        gathered = coded.group.allgather([outs], [x], options(AllgatherOptions)).get_future().wait()
        assert [out.data_ptr() for out in gathered] == [out.data_ptr() for out in outs]


EXACT = {
    "MAX": lambda group, x: group.allreduce([x], options(dist.AllreduceOptions, op=OPS.MAX)),
    "integers": lambda group, x: group.allreduce([x.int()], options(dist.AllreduceOptions)),
    "complex": lambda group, x: group.allreduce(
        [torch.view_as_real(torch.zeros(8, dtype=torch.complex64).to(LATE))], options(dist.AllreduceOptions)
    ),
    "broadcast": lambda group, x: group.broadcast([x], options(dist.BroadcastOptions)),
    "reduce": lambda group, x: group.reduce([x], options(dist.ReduceOptions)),
    "gather": lambda group, x: group.gather([[x.clone(), x.clone()]], [x], options(dist.GatherOptions)),
    "scatter": lambda group, x: group.scatter([x.clone()], [[x, x]], options(dist.ScatterOptions)),
    "all_to_all_single": lambda group, x: group.alltoall_base(
        x.clone(), x, [], [], options(dist.AllToAllOptions)
    ),
    "all_to_all": lambda group, x: group.alltoall(
        [x.clone(), x.clone()], [x, x.clone()], options(dist.AllToAllOptions)
    ),
    "send": lambda group, x: group.send([x], 1, 0),
}


@pytest.mark.parametrize("which", ["none", "all"])
@pytest.mark.parametrize("name", EXACT)
def test_all_else_goes_to_the_devices_own_backend(coded, name, which):
    with late_device.late(which) as native:
        all_reduce(coded.group, 1.0)
        native.synchronize()
        before, sent = native.operations(), coded.backend.device_comm.bytes_sent
        work = EXACT[name](coded.group, filled(2.0))
        work.wait()
        assert native.operations() > before
        assert coded.backend.device_comm.bytes_sent == sent


def test_without_a_codec_everything_goes_to_the_devices_own_backend():
    plain = make_group()
    with late_device.late("all") as native:
        assert not plain.exact
        for call in ENCODED:
            assert torch.equal(call(plain.group, 3.0).cpu().flatten()[:3], torch.full((3,), 6.0)), call
        [backend] = plain.exact
        assert backend.own_stream_calls > 0
        assert plain.backend.backend_of(torch.device(LATE)) is backend
        before = native.barriers()
        barrier = dist.BarrierOptions()
        barrier.device_ids = [0]
        plain.group.barrier(barrier)
        assert native.barriers() == before + 1


def test_small_tensors_are_exact_beside_encoded_ones_of_one_coalesced_call():
    some = make_group(codec=gs.Int8(), min_bytes=1000)
    for which in WHICH:
        with late_device.late(which):
            tensors = [filled(1.01, numel) for numel in (200, 300, 249, 250)]
            given = dist.AllreduceCoalescedOptions()
            given.asyncOp = True
            some.group.allreduce_coalesced(tensors, given).wait()
            for x in tensors:
                assert torch.allclose(x.cpu(), torch.full((x.numel(),), 2.02), rtol=0.02)
    assert some.backend.device_comm.bytes_sent > 0
    assert len(some.exact) == 1


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("async_ops", [True, False])
def test_coalesced_operations_end_with_one_work(coded, which, async_ops):
    with late_device.late(which):
        a, b, message, landed = filled(1.0), filled(2.0), filled(5.0), filled(0.0)
        coded.group._start_coalescing(torch.device(LATE))
        coded.group.send([message], 1, 0)
        assert coded.group.allreduce([a], options(dist.AllreduceOptions, async_op=async_ops)) is None
        coded.group.recv([landed], 1, 0)
        coded.group.allreduce([b], options(dist.AllreduceOptions, op=OPS.AVG, async_op=async_ops))
        work = coded.group._end_coalescing(torch.device(LATE))
        work.wait()
        for x, want in ((a, 2.0), (b, 2.0), (landed, 5.0)):
            assert torch.allclose(x.cpu(), torch.full((NUMEL,), want), rtol=0.02)


def test_batched_messages_between_cpu_tensors_end_with_one_work(coded):
    assert coded.backend.supports_coalescing
    cpu, sent, landed, there = torch.device("cpu"), torch.arange(5.0), torch.zeros(5), torch.zeros(5)
    coded.group._start_coalescing(cpu)
    coded.group.recv([landed], 1, 7)
    coded.group.send([sent], 1, 7)
    work = coded.group._end_coalescing(cpu)
    assert not work.is_completed()
    coded.other.send([sent + 1], 0, 7)
    coded.other.recv([there], 0, 7).wait()
    work.wait()
    assert work.is_completed()
    assert torch.equal(landed, sent + 1)
    assert torch.equal(there, sent)
    coded.group._start_coalescing(cpu)
    assert coded.group._end_coalescing(cpu).is_completed()
    with pytest.raises(gs.ConfigError, match=r"endCoalescing\(\) without startCoalescing"):
        coded.group._end_coalescing(cpu)


def test_a_graph_is_refused_with_the_reason(coded):
    with late_device.late("none") as native:
        native.set_capturing(True)
        try:
            with pytest.raises(
                gs.ConfigError, match="a CUDA graph cannot hold an encoded operation of a process group"
            ):
                all_reduce(coded.group, 1.0)
        finally:
            native.set_capturing(False)


def test_time_limits_and_the_end_of_the_group_reach_the_devices_backend():
    ending = make_group(codec=gs.Int8(), min_bytes=0)
    with late_device.late("all") as native:
        broadcast = options(dist.BroadcastOptions)
        ending.group.broadcast([filled(1.0)], broadcast)
        ending.group.set_timeout(timedelta(seconds=7))
        assert ending.exact[0].timeout == timedelta(seconds=7)
        before = native.shutdowns()
        x = filled(3.0)
        ending.group.allreduce([x], options(dist.AllreduceOptions)).wait()
        ending.backend.shutdown()
        assert native.shutdowns() == before + 2
        assert torch.allclose(x.cpu(), torch.full((NUMEL,), 6.0), rtol=0.02)
        for call in (lambda: all_reduce(ending.group, 1.0), lambda: ending.group.broadcast([x], broadcast)):
            with pytest.raises(gs.CommError, match="the group was shut down; make a new one"):
                call()


def test_abort_ends_what_the_devices_backend_has_in_flight():
    ending = make_group(codec=gs.Int8(), min_bytes=0)
    with late_device.late("all"):
        x = filled(1.0)
        ending.group.broadcast([x], options(dist.BroadcastOptions))
        ending.backend.abort()
        assert ending.exact[0].is_aborted


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weights = nn.ParameterList(torch.full((NUMEL,), float(i), device=device) for i in range(3))
        self.steps = 0

    def forward(self, x):
        """Parameter i has the gradient i + 1; in DDP's first step, which has one bucket of all parameters, all have 1.

        The device's communicator hands out one rank's chunk as all ranks', so equal values must fill a bucket.
        """
        for i, param in enumerate(self.weights):
            x = Layer.apply(x, param, float(i + 1) if self.steps else 1.0)
        self.steps += 1
        return x


def trained(group, which, seed=lambda native: None, hook=None):
    with late_device.late("none") as native:
        model = DistributedDataParallel(Model(LATE), process_group=group, bucket_cap_mb=0.001)
        if hook:
            model.register_comm_hook(group, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
        for step in range(3):
            if step == 2:
                native.synchronize()
                native.set_late(late_device.LATENESS[which])
                native.drop_wait(-1)
                seed(native)
            optimizer.zero_grad()
            model(torch.zeros((), device=LATE, requires_grad=True)).backward()
            optimizer.step()
        waits = native.waits()
        weights = torch.stack([param.detach().cpu() for param in model.module.weights])
    want = torch.stack([torch.full((NUMEL,), i - 0.5 - 1.0 * (i + 1)) for i in range(3)])
    return torch.allclose(weights, want, rtol=0.03), waits


@pytest.mark.parametrize("which", WHICH)
def test_stock_ddp_trains_over_the_group(coded, which):
    right, waits = trained(coded.group, which)
    assert right
    assert waits >= 2
    if which in ("main", "side"):
        runs = [trained(coded.group, which, lambda native, n=n: native.drop_wait(n))[0] for n in range(waits)]
        assert not all(runs)
