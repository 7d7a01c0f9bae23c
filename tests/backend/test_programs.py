"""torch's own distributed features over the backend: DDP, FSDP2, DTensor, checkpoints, objects, groups.

The tests run in the ranks of a job (tests/support/jobs.py). Symmetric memory and several initialisations are in
test_groups.py.
"""

import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.backend.jobs import TESTED, join, values
from tests.support.jobs import Job

pytestmark = pytest.mark.usefixtures("job")


@pytest.fixture(scope="module", params=[2, 3])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with Job(request.param) as job, job.within(join, dist.destroy_process_group, backend=TESTED):
        yield job


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))


def train(
    wrapped: nn.Module, optimizer, *, steps: int = 4, data: Callable[[int], torch.Tensor] | None = None
):
    rank = dist.get_rank()
    for step in range(steps):
        batch = (
            data(step)
            if data
            else torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank))
        )
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_stock_ddp_ends_at_the_weights_that_gloo_gives() -> None:
    ends = []
    for group in (None, dist.new_group(backend="gloo")):
        wrapped = nn.parallel.DistributedDataParallel(
            model(dist.get_rank()), process_group=group, bucket_cap_mb=0.004
        )
        train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9))
        ends.append(flat(wrapped))
    every = [torch.empty_like(ends[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(every, ends[0])
    assert all(torch.equal(every[0], one) for one in every)
    if dist.get_world_size() == 2:
        assert torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


def test_ddp_with_unused_parameters_static_graph_uneven_inputs_and_a_compression_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(12, 4), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    rank, size = dist.get_rank(), dist.get_world_size()
    wrapped = nn.parallel.DistributedDataParallel(Half(), find_unused_parameters=True)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), steps=2)
    wrapped = nn.parallel.DistributedDataParallel(model(), static_graph=True)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), steps=2)
    wrapped = nn.parallel.DistributedDataParallel(model())
    with wrapped.join():
        train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), steps=2 + rank)
    every = [torch.empty_like(flat(wrapped)) for _ in range(size)]
    dist.all_gather(every, flat(wrapped))
    assert all(torch.equal(every[0], one) for one in every)


def test_fsdp2_trains_like_a_single_process() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    sharded, single = model(), model()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)

    def all_batches(step: int) -> torch.Tensor:
        return torch.randn(6 * size, 12, generator=torch.Generator().manual_seed(step))

    rank = dist.get_rank()
    train(
        sharded, torch.optim.Adam(sharded.parameters()), data=lambda step: all_batches(step)[6 * rank :][:6]
    )
    train(single, torch.optim.Adam(single.parameters()), data=all_batches)
    for one, other in zip(sharded.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-5)


def test_dtensor_shards_gathers_reduces_and_multiplies() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = values(3, (2 * size + 1, 4 * size))  # dimension 0 does not divide
    by_rows = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    assert torch.equal(by_rows.full_tensor(), whole)
    by_columns = by_rows.redistribute(mesh, [Shard(1)])  # all-to-all
    assert torch.equal(by_columns.to_local(), whole.chunk(size, 1)[dist.get_rank()])
    assert torch.equal(by_columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    parts = DTensor.from_local(whole.clone(), mesh, [Partial()])
    assert torch.equal(parts.redistribute(mesh, [Replicate()]).to_local(), size * whole)
    assert torch.equal(parts.redistribute(mesh, [Shard(1)]).full_tensor(), size * whole)
    product = by_columns @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    assert torch.equal(product.full_tensor(), whole @ whole.t())


def test_functional_collectives() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = values(rank, (4 * size, 3))
    total = sum(values(r, (4 * size, 3)) for r in range(size))
    assert torch.equal(functional.all_reduce(x, "sum", group), total)
    assert torch.equal(functional.all_reduce_coalesced([x, 2 * x], "sum", group)[1], 2 * total)
    gathered = torch.cat([values(r, (4 * size, 3)) for r in range(size)])
    assert torch.equal(functional.all_gather_tensor(x, 0, group), gathered)
    assert torch.equal(functional.all_gather_into_tensor_coalesced([x, x], group)[1], gathered)
    assert torch.equal(functional.reduce_scatter_tensor(x, "sum", 0, group), total.chunk(size)[rank])
    assert torch.equal(
        functional.reduce_scatter_tensor_coalesced([x], "sum", [0], group)[0], total.chunk(size)[rank]
    )
    assert torch.equal(functional.broadcast(x, size - 1, group), values(size - 1, (4 * size, 3)))
    swapped = functional.all_to_all_single(x, [4] * size, [4] * size, group)
    assert torch.equal(swapped, torch.cat([values(r, (4 * size, 3)).chunk(size)[rank] for r in range(size)]))


def test_object_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * (10 * rank)}  # of unlike sizes
    every = [{"rank": r, "text": "x" * (10 * r)} for r in range(size)]
    got: list = [None] * size
    dist.all_gather_object(got, mine)
    assert got == every
    sent = [mine, 5, None] if rank == size - 1 else [None] * 3
    dist.broadcast_object_list(sent, src=size - 1)
    assert sent == [every[-1], 5, None]
    kept: list = [None] * size
    dist.gather_object(mine, kept if rank == 0 else None, dst=0)
    assert kept == (every if rank == 0 else [None] * size)
    one: list = [None]
    dist.scatter_object_list(one, every if rank == 0 else None, src=0)
    assert one == [mine]
    if rank == 0:
        dist.send_object_list([every], dst=1)
    elif rank == 1:
        received: list = [None]
        dist.recv_object_list(received, src=0)
        assert received == [every]


def test_zero_redundancy_optimizer_ends_where_its_plain_one_does() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ends = []
    for sharded in (False, True):
        wrapped = nn.parallel.DistributedDataParallel(model())
        kind = torch.optim.Adam
        optimizer = (
            ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=kind, lr=0.01)
            if sharded
            else kind(wrapped.parameters(), lr=0.01)
        )
        train(wrapped, optimizer)
        if sharded:
            optimizer.consolidate_state_dict(to=0)
        ends.append(flat(wrapped))
    assert torch.equal(*ends)


def test_a_sharded_checkpoint_is_saved_and_loaded() -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor, zeros

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = values(5, (11, 3))
    state = {"sharded": distribute_tensor(whole.clone(), mesh, [Shard(0)]), "plain": whole + 1, "step": 7}
    checkpoint.save(state, checkpoint_id=folder[0])
    blank = {
        "sharded": zeros(11, 3, device_mesh=mesh, placements=[Shard(0)]),
        "plain": torch.zeros(11, 3),
        "step": 0,
    }
    checkpoint.load(blank, checkpoint_id=folder[0])
    assert torch.equal(blank["sharded"].full_tensor(), whole)
    assert torch.equal(blank["plain"], whole + 1)
    assert blank["step"] == 7


def test_batched_sends_and_receives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 500_000):
        outputs = [torch.empty(count) for _ in range(size)]
        operations = []
        for peer in range(size):
            if peer != rank:
                operations.append(dist.P2POp(dist.isend, values(10 * rank + peer, (count,)), peer))
                operations.append(dist.P2POp(dist.irecv, outputs[peer], peer))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for peer in range(size):
            assert peer == rank or torch.equal(outputs[peer], values(10 * peer + rank, (count,)))
    if rank == 0:
        got = torch.empty(1)
        assert sorted(dist.recv(got) for _ in range(size - 1)) == list(range(1, size))
    else:
        dist.send(torch.ones(1), dst=0)


def test_coalescing_manager_and_complex_sums() -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    size = dist.get_world_size()
    tensors = [torch.full((count,), 1.0) for count in (1, 1000, 30)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [tensor.unique().tolist() for tensor in tensors] == [[float(size)]] * 3
    numbers = torch.tensor([1 + 2j, -3j])
    dist.all_reduce(numbers)
    assert numbers.tolist() == [size * (1 + 2j), size * -3j]
