"""Run by test_late.py. The engine and its executor on a device whose work is late: a missing wait gives wrong numbers.

Streams of tests/cpp/device/streams.h run in an order that is as bad as the waits between them allow. The tests also
drop one wait at a time, and all records of memory on a stream, and see that this is noticed.
"""

import ctypes
import threading

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer import _C
from gossamer.engine import Connections
from tests.support import late_device

STEPS = 3
LAYERS = 4
ALGORITHMS = {
    "exact": lambda: gs.GradientAllReduce(),
    "deterministic": lambda: gs.GradientAllReduce(deterministic=True),
    "int8": lambda: gs.GradientAllReduce(codec=gs.Int8()),
    "sum of int8": lambda: gs.GradientAllReduce(codec=gs.Int8(), average=False),
    "int4 with feedback": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4())),
    "one bit": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.OneBit())),
}


class Layer(torch.autograd.Function):
    """Has a gradient of one value everywhere. Forward and backward only queue work, and never wait for the device."""

    @staticmethod
    def forward(ctx, x, param, value):
        ctx.save_for_backward(param)
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        [param] = ctx.saved_tensors
        return grad, torch.empty_like(param).fill_(ctx.value), None


class Network(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weights = nn.ParameterList(torch.full((300,), float(i), device=device) for i in range(LAYERS))
        self.step = 0

    def forward(self, x):
        self.step += 1
        for i, param in enumerate(self.weights):
            x = Layer.apply(x, param, float(self.step * (i + 1)))
        return x


def flat(size=2):
    """A group of ranks with equal values. Returns rank 0's communicators, for the device and for CPU tensors."""
    return late_device.communicator(size), late_device.communicator(size, device="cpu")


def two_by_two():
    return late_device.by_hosts(lambda _, size: late_device.communicator(size)), flat(4)[1]


GROUPS = {"flat": flat, "two hosts": two_by_two}


def wrap(algorithm, monkeypatch, *, comms=flat, bucket_bytes=1000, broadcast=True):
    """Returns a model of rank 0 in a group, and its optimizer."""
    links = Connections(*comms(), None)
    monkeypatch.setattr("gossamer.engine.face.connect", lambda module, group: links)
    network, optimizer = network_with_optimizer()
    model = gs.DataParallel(
        network,
        optimizer,
        algorithm=ALGORITHMS[algorithm](),
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=bucket_bytes,
        broadcast=broadcast,
    )
    return model, optimizer


def network_with_optimizer():
    network = Network("late")
    return network, torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.5, foreach=False)


def take_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.zeros((), device="late", requires_grad=True)).backward()
    optimizer.step()


def train(algorithm, which, monkeypatch, seed=lambda native: None, comms=flat):
    """Trains STEPS steps, the last one after `seed`. Returns the weights and the number of waits in the last step."""
    with late_device.late("none") as native:
        model, optimizer = wrap(algorithm, monkeypatch, comms=comms)
        if algorithm == "sum of int8":
            optimizer.param_groups[0]["lr"] /= model.links.comm.size
        for step in range(STEPS):
            if step == STEPS - 1:
                native.synchronize()
                native.set_late(late_device.LATENESS[which])
                native.drop_wait(-1)
                seed(native)
            take_step(model, optimizer)
        waits = native.waits()
        weights = [param.detach().cpu() for param in model.module.weights]
        model.close()
    return torch.stack(weights), waits


def expected():
    network = Network("cpu")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        network(torch.zeros((), requires_grad=True)).backward()
        optimizer.step()
    return torch.stack([param.detach() for param in network.weights])


def is_right(weights):
    return torch.allclose(weights, expected(), rtol=0.02)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("which", ["none", "main", "side", "all"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_gives_the_right_weights_whichever_streams_are_late(algorithm, which, group, monkeypatch):
    weights, waits = train(algorithm, which, monkeypatch, comms=GROUPS[group])
    assert is_right(weights)
    assert waits >= LAYERS + 1  # one for each bucket, and one for the optimizer


# Ranks have equal gradients here, so a mean is what each rank has. A sum is not.
# Not needed by hosts: later buckets wait for what the side stream held before, which is nothing here. And the side
# stream waits for each bucket, where the last one on a stream is after the others.
REDUNDANT_WAITS = {"flat": 0, "two hosts": (LAYERS - 1) + (LAYERS - 2)}


@pytest.mark.parametrize(
    ("algorithm", "group"), [("exact", "flat"), ("sum of int8", "flat"), ("sum of int8", "two hosts")]
)
def test_each_wait_between_streams_is_needed(algorithm, group, monkeypatch):
    _, waits = train(algorithm, "none", monkeypatch, comms=GROUPS[group])
    right = []
    for number in range(waits):

        def drop(native, number=number):
            native.drop_wait(number)

        runs = [train(algorithm, which, monkeypatch, drop, GROUPS[group])[0] for which in ("main", "side")]
        right += [number] if all(map(is_right, runs)) else []
    assert len(right) == REDUNDANT_WAITS[group], right


def launches_of_a_step(native, model, optimizer):
    """Returns what the second step queues: on the main stream, on others, and how many of these are the group's."""
    take_step(model, optimizer)
    native.synchronize()
    before = [*native.tasks(), native.operations()]
    take_step(model, optimizer)
    native.synchronize()
    main, side, operations = (
        now - then for now, then in zip([*native.tasks(), native.operations()], before, strict=True)
    )
    return main, side - operations, operations


# For each bucket: gather; encode, reduce and decode where there is a codec; one more clears the error's padding.
LAUNCHES = {
    "exact": (1, 1),
    "deterministic": (2, 2),
    "int8": (4, 2),
    "int4 with feedback": (5, 2),
    "one bit": (5, 2),
}


@pytest.mark.parametrize(("buckets", "bucket_bytes"), [(1, 5000), (LAYERS, 1000)])
@pytest.mark.parametrize("algorithm", LAUNCHES)
def test_a_step_queues_few_kernels_and_operations_of_the_group_for_each_bucket(
    algorithm, buckets, bucket_bytes, monkeypatch
):
    with late_device.late("none") as native:
        plain, _, _ = launches_of_a_step(native, *network_with_optimizer())
        model, optimizer = wrap(algorithm, monkeypatch, comms=lambda: flat(8), bucket_bytes=bucket_bytes)
        main, kernels, operations = launches_of_a_step(native, model, optimizer)
        model.close()
    assert main == plain  # nothing on the stream of forward and backward
    assert (kernels / buckets, operations / buckets) == LAUNCHES[algorithm]


def test_a_gradient_that_is_replaced_while_the_side_stream_is_late_must_be_recorded(monkeypatch):
    weights, _ = train("exact", "side", monkeypatch, lambda native: native.drop_records(True))
    assert not is_right(weights)


def bucket_of(param):
    return _C.Bucket(0, [0], [param], ["param"], _C.Placement.in_turn([param], 1, 1))


@pytest.mark.parametrize("recorded", [True, False])
def test_flat_memory_outlives_a_bucket_that_is_dropped_while_the_side_stream_is_late(recorded):
    with late_device.late("side") as native:
        native.drop_records(not recorded)
        device = torch.device("late", 0)
        buckets = [bucket_of(nn.Parameter(torch.zeros(100, device=device)))]
        buckets[0].add_field("grad", None)
        buckets[0].flat("grad").fill_(3.0)
        result = torch.zeros(100, device=device)
        executor, done = _C.Executor(device), threading.Event()

        def task():
            bucket = buckets.pop()
            result.copy_(bucket.flat("grad")[:100])
            del bucket
            done.set()

        executor.submit(task)
        assert done.wait(30)
        executor.wait()
        assert torch.equal(result.cpu(), torch.full((100,), 3.0)) == recorded
        executor.stop()


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_a_weight_leaves_outlives_the_copy_into_its_bucket(recorded):
    with late_device.late("side") as native:
        native.drop_records(not recorded)
        device = torch.device("late", 0)
        param = nn.Parameter(torch.zeros(100, device=device))
        bucket = bucket_of(param)
        bucket.add_field("weight", None)
        bucket.adopt_weights()
        param.data = torch.full((100,), 5.0, device=device)
        executor = _C.Executor(device)
        executor.submit(bucket.adopt_weights)
        executor.wait()
        assert torch.equal(param.detach().cpu(), torch.full((100,), 5.0)) == recorded
        executor.stop()


def test_gradients_are_gathered_while_the_bucket_before_them_is_on_its_way(monkeypatch):
    with late_device.late("none") as native:
        first, second = late_device.wired_pair()
        model, optimizer = wrap("exact", monkeypatch, comms=lambda: (first, flat()[1]), broadcast=False)

        def backward():
            optimizer.zero_grad()
            model(torch.zeros((), device="late", requires_grad=True)).backward()

        def other_rank():
            for bucket in model.engine.buckets:
                second.all_reduce(torch.zeros(bucket.numel)).wait()

        other = threading.Thread(target=other_rank)
        other.start()
        backward()
        other.join()
        native.synchronize()
        backward()  # the other rank has not come
        held = [
            list((ctypes.c_float * 300).from_address(bucket.flat("grad").data_ptr()))
            for bucket in model.engine.buckets
        ]
        other_rank()
        native.synchronize()
        assert held == [
            [float(layer)] * 300 for layer in range(LAYERS, 0, -1)
        ]  # twice layer, halved for the mean
        model.close()


def test_a_bucket_is_inside_hosts_while_the_one_before_it_is_between_them(monkeypatch):
    with late_device.late("none") as native:
        others = {}

        def level(name, _):
            first, others[name] = late_device.wired_pair()
            return first

        comms = late_device.by_hosts(level), flat(4)[1]
        model, _ = wrap("deterministic", monkeypatch, comms=lambda: comms, broadcast=False)
        parts = [bucket.numel // 2 for bucket in model.engine.buckets]

        def other_rank(name, buckets):  # which has zeros
            for numel in buckets:
                part, row = torch.zeros(numel), torch.zeros(2 * numel)
                if name == "inside":
                    others[name].all_to_all(row, torch.zeros(2 * numel)).wait()
                if name == "across":
                    others[name].all_to_all(torch.empty(numel), part).wait()
                    others[name].all_gather(part, part[: numel // 2]).wait()
                if name == "back":
                    others[name].all_gather(row, part).wait()

        model(torch.zeros((), device="late", requires_grad=True)).backward()
        other_rank("inside", parts[:2])  # the other host has not come, and no bucket has ended
        threads = [
            threading.Thread(target=other_rank, args=of)
            for of in [("inside", parts[2:]), ("across", parts), ("back", parts)]
        ]
        for thread in threads:
            thread.start()
        native.synchronize()
        for thread in threads:
            thread.join()
        model.close()
