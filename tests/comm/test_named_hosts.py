# Where the bytes of named operations go: how many are counted, and whether sums go by hosts. Hosts are made up of
# threads, and in the last tests of network namespaces, with the Horovod face and its variable.

import re

import pytest
import torch

from gossamer import netlab
from tests.comm.named import result, run_named
from tests.support.forks import fork_on_hosts

BYTES = 4096  # of each tensor here
needs_netlab = pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing() or "available")


def sample(rank, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize(("data", "control"), [("gossamer", "host"), ("gloo", "gloo"), ("gloo", "host")])
def test_the_bytes_of_every_operation_are_counted(data, control) -> None:
    """By their definitions, for 4 ranks: a sum counts as in a ring; what a rank keeps counts nothing."""

    def body(named):
        x, counts = torch.ones(4, BYTES // 16), []

        def counted(kind, **arguments):
            before = named.bytes_sent, named.bytes_received
            result(named, kind, x, kind, **arguments)
            counts.append((named.bytes_sent - before[0], named.bytes_received - before[1]))

        counted("allreduce")
        counted("allreduce", op=4)
        counted("reducescatter")
        counted("allgather")
        counted("broadcast", root=1)
        counted("alltoall", splits=[1, 0, 2, 1] if named.rank == 0 else [0, 4, 0, 0])
        return counts

    row = BYTES // 4
    for rank, counts in enumerate(run_named(4, body, data=data, control=control)):
        sums, parts, all_rows = [(6 * row, 6 * row)] * 2, (3 * row, 3 * row), (12 * row, 12 * row)
        sent = (BYTES, 0) if rank == 1 else (0, BYTES)
        swapped = [(3 * row, 0), (0, 8 * row), (BYTES, 2 * row), (BYTES, row)][rank]
        assert counts == [*sums, parts, all_rows, sent, swapped]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_go_by_hosts_and_give_equal_bits_on_all_ranks(size, dtype) -> None:
    comms = {}
    shapes = [(1,), (7,), (1000,), (300_001,)]  # some are packed on a flat group, and one goes alone

    def body(named):
        outs = []
        for factor, group in ((1.0, None), (0.5, "")):
            xs = [sample(named.rank, shape[0], dtype) for shape in shapes]
            names = [f"x{factor}{len(x)}" for x in xs]
            operations = named.submit("allreduce", xs, names=names, op=0, prescale=factor, group=group)
            for operation in operations:
                operation.wait()
                outs.append(operation.output)
        return outs

    results = run_named(size, body, data="gloo", control="two hosts", comms=comms)
    for number, shape in enumerate(2 * shapes):
        mean = sum(sample(rank, shape[0], dtype).double() for rank in range(size)) / size
        mean *= 1.0 if number < len(shapes) else 0.5
        for outs in results:
            assert torch.equal(outs[number].view(torch.uint8), results[0][number].view(torch.uint8))
            tolerance = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(outs[number].double(), mean, rtol=tolerance, atol=tolerance)
    assert comms[0].bytes_across > 0
    made = (
        2 * 8 * (size - 1) + 2 * 4 * (size - 1) // size
    )  # hierarchy() compares these, and the ranks agree that all have connected
    assert comms[0].world.bytes_sent == made


def test_what_is_no_sum_of_floats_goes_between_all_ranks() -> None:
    comms = {}

    def body(named):
        assert result(named, "allreduce", torch.ones(8), "max", op=4).tolist() == [1.0] * 8
        assert result(named, "allreduce", torch.ones(8).int(), "sum").tolist() == [4] * 8
        assert result(named, "reducescatter", torch.ones(8), "part").tolist() == [4.0, 4.0]

    run_named(4, body, data="gloo", control="two hosts", comms=comms)
    assert [comm.bytes_across for comm in comms.values()] == [0] * 4


BY_HOSTS = """
import os, sys, torch
import gossamer.horovod.torch as hvd
from gossamer.comm import named as opened, sums_by_hosts

rank = int(os.environ["RANK"])
if rank > 0:
    os.environ.pop("HOROVOD_HIERARCHICAL_ALLREDUCE", None)  # rank 0 decides
hvd.init(backend=sys.argv[1])
native = hvd.global_process_set.native()
comm = opened._open[native].devices["cpu"]
x = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
y = hvd.allreduce(x, op=hvd.Sum, name="x")
every = hvd.allgather(y.view(torch.int32).view(1, -1), name="bits")
assert len(every) == 4 and bool((every == every[0]).all())

torch.manual_seed(0)
model = torch.nn.Linear(50, 50)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(3):
    optimizer.zero_grad()
    model(x[50 * step : 50 * step + 50]).square().sum().backward()
    optimizer.step()
assert optimizer.report()["way"] == "engine"
weights = hvd.allgather(model.weight.detach().view(1, -1), name="weights")
assert bool((weights == weights[0]).all())
of_gradients = optimizer._reduction._way._engine._worker._comm
print(sums_by_hosts(native), *(getattr(each, "bytes_across", None) for each in (comm, of_gradients)))
hvd.shutdown()
"""


@needs_netlab
@pytest.mark.parametrize("kind", ["gossamer", "gloo"])
@pytest.mark.parametrize("said", [None, "1", "0"])
def test_horovods_sums_go_by_hosts_unless_its_variable_says_otherwise(said, kind) -> None:
    environment = {} if said is None else {"HOROVOD_HIERARCHICAL_ALLREDUCE": said}
    for out, _ in fork_on_hosts(["-c", BY_HOSTS, kind], 2, ranks_per_host=2, environment=environment):
        decided, *across = out.split()
        assert decided == str(said != "0")
        assert [text != "None" and int(text) > 0 for text in across] == [said != "0"] * 2, out


KILLED = """
import os, signal, sys, time
import torch
import gossamer as gs
from gossamer.comm import open_named, sums_by_hosts

gs.init(backend="gloo")
rank, size, victim = gs.rank(), gs.size(), int(sys.argv[1])
named = open_named(None, range(size), key="all")
assert sums_by_hosts(named)
begun = time.monotonic()
try:
    for step in range(10**6):
        (operation,) = named.submit("allreduce", [torch.ones(1000)], names=[f"x{step % 5}"])
        operation.wait()
        if rank == victim and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
except gs.CommError as error:
    print(f"rank {rank} noticed in {time.monotonic() - begun:.1f} s: {error}", flush=True)
named.shutdown()
os._exit(0)
"""


@needs_netlab
@pytest.mark.parametrize("victim", [0, 3])
def test_all_ranks_of_all_hosts_learn_that_one_was_killed_while_sums_go_by_hosts(victim) -> None:
    outputs = fork_on_hosts(["-c", KILLED, victim], 2, ranks_per_host=2, killed=victim)
    noticed = [re.search(r"noticed in ([\d.]+) s: ", out) for out, _ in outputs]
    assert [found is not None for found in noticed] == [rank != victim for rank in range(4)], outputs
    assert all(float(found[1]) < 20 for found in noticed if found), outputs
