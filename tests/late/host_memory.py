"""Run by test_late.py in several processes under torchrun: sums through memory of the host, on devices that are late.

The c10d backend of the simulated device does not connect the ranks. So what arrives has come through the memory.
"""

import itertools
import os
import sys
import time
from datetime import timedelta

import torch

import gossamer as gs
from gossamer import _C
from gossamer import comm as comms
from gossamer.engine import Connections, face
from tests.late.engine import ALGORITHMS, LAYERS
from tests.support import late_device
from tests.support.codec_cases import CODECS, DTYPES

native = late_device.load()
gs.init(backend="gloo", timeout_s=60)
RANK, SIZE = gs.rank(), gs.size()


def groups(timeout_s=None):
    """Returns a communicator over memory of the host, and one of the same ranks for CPU tensors."""
    control, _ = comms.private(None, torch.device("cpu"))
    if timeout_s is not None:
        comms.c10d.origins[control].timeout = timeout_s
    device = comms.from_backend(native.Backend(RANK, SIZE), device="late:0")
    return comms.host_memory(device, control), control


def sample(seed, numel, dtype=torch.float32):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + RANK), dtype=torch.float64)
    x[5::97] *= 1e-6
    return x.to(dtype)


def same_bits(x, y):
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def mapped(what="memfd:gossamer"):
    with open("/proc/self/maps") as file:
        return sum(what in line for line in file)


def sums(which):
    """Every codec and dtype, with rows that grow, shrink and grow: the bits of the two-shot between CPU tensors."""
    own, control = groups()
    native.set_late(late_device.LATENESS[which])
    for call, numel in enumerate([0, 1, 257, 5003, 1021, 7, 20_011]):
        for dtype in DTYPES:
            for codec in [None, *CODECS]:
                x, plain = sample(call, numel, dtype).to("late"), sample(call, numel, dtype)
                for group, tensor in ((own, x), (control, plain)):
                    gs.all_reduce(tensor, codec=codec, deterministic=True, op="mean", nonce=call, group=group)
                assert same_bits(x.cpu(), plain), (codec, dtype, numel)
    exact, plain = sample(3, 777).to("late"), sample(3, 777)
    assert _C.sum(own, exact)
    gs.all_reduce(plain, deterministic=True, group=control)
    assert same_bits(exact.cpu(), plain)


def pieces(which):
    """Rows of more than a MiB go in pieces, on two streams: the bits of CPU tensors, also between sums in one piece."""
    own, control = groups()
    native.set_late(late_device.LATENESS[which])
    codecs = [None, gs.Int8(), gs.Int4(64), gs.OneBit(), gs.MinMaxUInt8(), gs.Int8(stochastic=True)]
    for call, (codec, numel) in enumerate(itertools.product(codecs, [2_500_003, 77])):
        for dtype in (torch.float32, torch.bfloat16)[: 1 + (codec is None)]:
            x, plain = sample(call, numel, dtype).to("late"), sample(call, numel, dtype)
            for group, tensor in ((own, x), (control, plain)):
                gs.all_reduce(tensor, codec=codec, deterministic=True, op="mean", nonce=call, group=group)
            assert same_bits(x.cpu(), plain), (codec, dtype, numel)
    x, plain = sample(99, 2_500_003), sample(99, 2_500_003)
    mine, error = torch.zeros_like(x, device="late"), torch.zeros_like(x)
    for call in range(3):
        late, cpu = x.to("late"), plain.clone()
        for group, tensor, owed in ((own, late, mine), (control, cpu, error)):
            gs.all_reduce(tensor, codec=gs.ErrorFeedback(gs.Int4()), error=owed, nonce=call, group=group)
        assert same_bits(late.cpu(), cpu)
        assert same_bits(mine.cpu(), error)
    for late_stream, harmful in (("main", [0]), ("side", [3, 4, 5])):
        native.set_late(late_device.LATENESS[late_stream])
        drop_waits(control, own, control, 3_000_001, harmful)


def drop_waits(control, own, plain_group, numel, harmful):
    """A sum in three pieces is wrong on some rank without any one of the `harmful` waits of a stream for the other.

    Waits 0 to 2 are the side stream's, before it writes a piece, and 3 to 5 those of the caller's stream.
    """

    def is_right(call, dropped=-1):
        plain, x = sample(call, numel), torch.zeros(numel, device="late")
        gs.all_reduce(plain, codec=gs.Int8(), group=plain_group)
        native.synchronize()
        x.copy_(sample(call, numel))  # as late as the sum
        native.drop_wait(dropped)
        gs.all_reduce(x, codec=gs.Int8(), group=own)
        waits = native.waits()
        native.drop_wait(-1)
        wrong = torch.tensor([float(not same_bits(x.cpu(), plain))])
        native.synchronize()
        control.all_reduce(wrong).wait()
        return waits, wrong.item() == 0

    assert is_right(0) == (6, True)
    calls = itertools.count(1)
    # A peer that comes early to a meeting hurries the late stream, which may hide one fault.
    right = [number for number in harmful if all(is_right(next(calls), number)[1] for _ in range(10))]
    assert not right, right


class Layer(torch.autograd.Function):
    """Has the gradient that it is given."""

    @staticmethod
    def forward(ctx, x, param, grad):
        ctx.save_for_backward(grad)
        return x.clone()

    @staticmethod
    def backward(ctx, out):
        [grad] = ctx.saved_tensors
        return out, grad.clone(), None


def trained(device, algorithm, connections):
    face.connect = lambda module, group: connections
    module = torch.nn.Module()
    module.weights = torch.nn.ParameterList(
        torch.full((300,), float(i), device=device) for i in range(LAYERS)
    )

    def forward(step):
        x = torch.zeros((), device=device, requires_grad=True)
        for i, param in enumerate(module.weights):
            x = Layer.apply(x, param, sample(10 * step + i, 300).to(device))
        return x

    module.forward = forward
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5, foreach=False)
    sizes = {"bucket_bytes": 1000, "first_bucket_bytes": 1000}
    model = gs.DataParallel(module, optimizer, algorithm=ALGORITHMS[algorithm](), **sizes)
    for step in range(5):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    weights = torch.stack([param.detach().cpu() for param in module.weights])
    model.close()
    return weights


def training(which):
    """A model trains to the bits of one whose gradients are CPU tensors."""
    own, control = groups()
    native.set_late(late_device.LATENESS[which])
    for algorithm in ALGORITHMS:
        if algorithm == "exact":
            continue  # it has the bits of "deterministic" here, and others on the CPU
        plain = trained("cpu", algorithm, Connections(control, control, None))
        assert same_bits(trained("late", algorithm, Connections(own, control, None)), plain), algorithm
    exact = trained("late", "exact", Connections(own, control, None))
    plain = trained("cpu", "deterministic", Connections(control, control, None))
    assert torch.allclose(exact, plain, rtol=1e-5, atol=1e-6)
    every = gs.all_gather(exact[None])
    assert all(torch.equal(every[0], other) for other in every)


def by_hosts(control, hosts):
    """Returns a communicator whose levels all go through memory of the host, and the same levels of CPU tensors."""
    world = comms.from_backend(native.Backend(RANK, SIZE), device="late:0")
    columns = [[host[place] for host in hosts] for place in range(min(map(len, hosts)))]
    inside, across = None, None
    for ranks in hosts:
        inside = through_memory(control, ranks) or inside
    for ranks in columns:
        across = through_memory(control, ranks) or across
    return _C.ByHosts(world, inside, across, hosts), comms.hierarchy(control, hosts)


def through_memory(control, ranks):
    near = comms.split(control, ranks, kind="gossamer")
    if near is None:
        return None
    return comms.host_memory(comms.from_backend(native.Backend(near.rank, near.size), device="late:0"), near)


def two_levels(*layouts):
    """Sums by hosts, where some ranks may carry nothing: the bits of the same levels of CPU tensors."""
    control, _ = comms.private(None, torch.device("cpu"))
    native.set_late(late_device.LATENESS["all"])
    for layout in layouts:  # such as 0,1/2,3
        hosts = [[int(rank) for rank in host.split(",")] for host in layout.split("/")]
        own, plain_group = by_hosts(control, hosts)
        for call, numel in enumerate([1, 257, 5003, 7, 20_011]):
            for codec in (None, gs.Int8(), gs.Int4(64)):
                x, plain = sample(call, numel).to("late"), sample(call, numel)
                for group, tensor in ((own, x), (plain_group, plain)):
                    gs.all_reduce(tensor, codec=codec, deterministic=True, op="mean", nonce=call, group=group)
                assert same_bits(x.cpu(), plain), (layout, codec, numel)
        x = trained("late", "int4 with feedback", Connections(own, control, None))
        plain = trained("cpu", "int4 with feedback", Connections(plain_group, control, None))
        assert same_bits(x, plain), layout
    square = by_hosts(control, [[0, 1], [2, 3]])
    drop_meetings(control, *square, 5003, meetings=4)
    drop_meetings(control, *square, 5_000_001, meetings=6)  # between hosts three pieces
    native.set_late(late_device.LATENESS["main"])
    # Each piece is summed inside the host before it is written.
    drop_waits(control, *square, 5_000_001, [0, 1, 2])


def drop_meetings(control, own, plain_group, numel, meetings):
    """Without any one of its meetings a sum is wrong: rank 0 is ahead of a rank whose values it needs."""

    def is_right(call, dropped=-1):
        plain, x = sample(call, numel), sample(call, numel).to("late")
        gs.all_reduce(plain, codec=gs.Int8(), group=plain_group)
        native.drop_meeting(dropped)
        gs.all_reduce(x, codec=gs.Int8(), group=own)
        met = native.drop_meeting(-1)
        if RANK == 0:  # the others run only what rank 0's meetings wait for
            native.synchronize()
        control.all_reduce(torch.zeros(1)).wait()
        return met, same_bits(x.cpu(), plain)

    is_right(0)  # makes the memory
    assert is_right(1) == (meetings, True)
    for dropped in range(meetings):
        right = is_right(2 + dropped, dropped)[1]
        assert RANK > 0 or not right, dropped
        control.all_reduce(torch.zeros(1)).wait()


def memory():
    """Memory that a rank cannot map is an error on every rank; otherwise all of it is given back."""
    begin = time.monotonic()  # on a busy machine a thread may still hold the memory of the job before
    while mapped() > 0 and time.monotonic() - begin < 30:
        time.sleep(0.05)
    in_shm, before = mapped("/dev/shm"), mapped()  # in docker /dev/shm has 64 MB
    if RANK == 1:
        native.fail_map_host(SIZE - 1)
    try:
        groups()
        raise AssertionError("an error was expected")
    except gs.CommError as error:
        text = str(error)
    assert "host memory of " in text, text
    assert "could not be shared; rank 1: late: map_host was told to fail" in text, text
    assert native.mapped_host() == 0
    own, control = groups()
    for numel in (1000, 2000, 50_000, 100):  # grows twice
        x = torch.full((numel,), RANK + 1.0).to("late")
        gs.all_reduce(x, codec=gs.Int8(), group=own)
        assert torch.allclose(x.cpu(), torch.full((numel,), SIZE * (SIZE + 1) / 2), rtol=0.01)
        assert native.mapped_host() <= 2 * SIZE  # that of the call before is freed when new memory is made
    assert mapped() > before, (mapped(), before)
    assert mapped("/dev/shm") == in_shm
    del own, control
    assert native.mapped_host() == 0
    assert mapped() <= before + 1  # what the failed group has left


def death():
    """A rank that ends is named: by the meeting of the devices, which then stops the device, and by the engine."""
    own, control = groups(timeout_s=timedelta(seconds=3))
    x = torch.ones(100).to("late")
    gs.all_reduce(x, codec=gs.Int8(), group=own)
    native.synchronize()
    control.all_reduce(torch.zeros(1)).wait()
    if RANK == 1:
        os._exit(0)
    begin = time.monotonic()
    gs.all_reduce(x, codec=gs.Int8(), group=own)
    for call in (native.synchronize, lambda: gs.all_reduce(x, codec=gs.Int8(), group=own)):
        try:
            call()
            raise AssertionError("an error was expected")
        except (RuntimeError, gs.CommError) as error:
            text = str(error)
    assert "meet: rank 1 did not come in time" in text, text
    assert time.monotonic() - begin < 30
    print("said", flush=True)
    os._exit(0)


if __name__ == "__main__":
    for called in sys.argv[1].split(" + "):  # such as "sums all + memory"
        name, *arguments = called.split()
        globals()[name](*arguments)
        native.settle()
    gs.shutdown()
