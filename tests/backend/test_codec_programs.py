"""Whole programs over process groups with a codec. Only the options of their groups are not stock.

The tests run in the four ranks of a job (tests/support/jobs.py), whose default group has a codec. An exact run of the
same program uses a group without one. Sizes of parameters are multiples of the codec's block, so bits do not depend on
the bucket in which a parameter lies.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs
from tests.backend.jobs import CPU, TESTED, assert_bits, noise, values
from tests.support.jobs import Job

pytestmark = [
    pytest.mark.usefixtures("job"),
    pytest.mark.skipif(TESTED != "gossamer", reason="Gloo has no codecs"),
]

SIZE, STEPS, ROWS = 4, 4, 8
CODEC = gs.Int8()
INT8 = gs.Options(CODEC, min_bytes=1024)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job(SIZE) as job, job.within(_begin, _end):
        yield job


def _begin() -> None:
    dist.init_process_group("gossamer", pg_options=INT8, timeout=timedelta(seconds=40))


def _end() -> None:
    for cached in (grid, line, exact_group, pairs):
        cached.cache_clear()
    dist.destroy_process_group()


@cache
def exact_group() -> dist.ProcessGroup:
    return dist.new_group()


@cache
def pairs() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The pair of this rank, with a codec and without."""
    both = []
    for options in (INT8, None):
        groups = [dist.new_group(ranks, pg_options=options) for ranks in ([0, 1], [2, 3])]
        both.append(groups[dist.get_rank() // 2])
    return both[0], both[1]


@cache
def line(gather_codec: gs.Codec | None = None, *, exact: bool = False) -> DeviceMesh:
    options = gs.Options(CODEC, gather_codec=gather_codec, min_bytes=1024)
    override: dict[str, Any] = {"shards": ("gossamer", None if exact else options)}
    return init_device_mesh("cpu", (SIZE,), mesh_dim_names=("shards",), backend_override=override)


@cache
def grid(outer: str, inner: str, *, exact: bool = False) -> DeviceMesh:
    """Two by two, with the codec on the outer axis."""
    override = {} if exact else {outer: ("gossamer", INT8)}
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(outer, inner), backend_override=override)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def batch(step: int, rank: int | None = None) -> Tensor:
    return noise(100 * step + (dist.get_rank() if rank is None else rank), (ROWS, 64)) / 8


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1)).square().mean()


def train(model: nn.Module, rank: int | None = None) -> float:
    """Trains on the batches of a rank (None: of this one), and returns the loss of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
    return loss.item()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sent(group: dist.ProcessGroup) -> int:
    return int(group._get_backend(CPU).comm.bytes_sent)


def gradient(layer: nn.Module) -> Tensor:
    """The gradient of this rank alone."""
    loss_of(layer, batch(0)).backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.flatten()


def square() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64, bias=False)


def train_near_and_not_equal(coded: nn.Module, exact: nn.Module, rank: int | None = None) -> None:
    rounded, loss = train(coded, rank), train(exact, rank)
    assert abs(rounded - loss) < 0.01 * loss, (rounded, loss)
    pairs = zip(coded.parameters(), exact.parameters(), strict=True)
    assert not any(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)


@cache
def ddp_weights() -> Tensor:
    wrapped = DistributedDataParallel(network())
    train(wrapped)
    return flat(wrapped)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "no_sync"])
def test_stock_ddp_has_the_bits_of_bytegrad(size: int, accumulate: bool) -> None:
    """Torch's DDP divides before the sum. Int8 commutes with a division by a power of two."""
    coded, exact = pairs() if size == 2 else (dist.group.WORLD, exact_group())
    ends = []
    for wrap in (
        lambda model, _: DistributedDataParallel(model, process_group=coded),
        lambda model, sgd: gs.DataParallel(model, sgd, algorithm=gs.ByteGrad(), process_group=exact),
        lambda model, _: DistributedDataParallel(model, process_group=exact),
    ):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped, before = wrap(model, optimizer), sent(coded)
        for step in range(STEPS):
            optimizer.zero_grad()
            if accumulate:
                with wrapped.no_sync():
                    loss_of(wrapped, batch(step + 50)).backward()
            loss_of(wrapped, batch(step)).backward()
            optimizer.step()
        ends.append((flat(model), sent(coded) - before))
    (rounded, bytes_sent), (same, _), (other, none) = ends
    assert_bits(rounded, same)
    assert not torch.equal(rounded, other)
    whole = STEPS * 2 * (size - 1) / size * rounded.nbytes
    assert 0.25 < bytes_sent / whole < 0.27
    assert none == 0


def test_composable_replicate_has_the_bits_of_ddp() -> None:
    from torch.distributed._composable.replicate import replicate

    model = replicate(network())
    train(model)
    assert_bits(flat(model), ddp_weights())


def test_fsdp2_reduce_scatters_through_the_codec_and_gathers_exactly() -> None:
    layer, mesh = fully_shard(square(), mesh=line()), line()
    got = loss_of(layer, batch(0))
    assert_bits(got, loss_of(square(), batch(0)))
    got.backward()
    want = gs.reduce_scatter(gradient(square()), codec=CODEC, op="mean")
    assert_bits(layer.weight.grad.to_local().flatten(), want)
    assert 0.25 < sent(mesh.get_group()) / (3 / 4 * square().weight.nbytes) < 0.27


def test_fsdp2_gathers_through_a_codec_of_its_own() -> None:
    layer = fully_shard(square(), mesh=line(gs.BF16()))
    shard = layer.weight.to_local().detach().clone()
    rounded = gs.all_gather(shard.flatten(), codec=gs.BF16()).view(64, 64)
    assert not torch.equal(rounded, square().weight)
    assert_bits(layer(batch(0)), nn.functional.linear(batch(0), rounded))
    layer.reshard()
    assert_bits(layer.weight.to_local(), shard)


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("kind", ["FSDP2", "HSDP"])
def test_sharded_models_train_as_without_the_codec(kind: str) -> None:
    def mesh(exact: bool) -> DeviceMesh:
        return line(exact=exact) if kind == "FSDP2" else grid("hosts", "shards", exact=exact)

    train_near_and_not_equal(sharded(mesh(False)), sharded(mesh(True)))


def test_hsdp_is_exact_inside_a_host_and_encoded_between_hosts() -> None:
    mesh = grid("hosts", "shards")
    layer = fully_shard(square(), mesh=mesh)
    hosts, shards = mesh["hosts"].get_group(), mesh["shards"].get_group()
    before = sent(hosts)
    loss_of(layer, batch(0)).backward()
    count = square().weight.numel() // 2
    assert 0.25 < (sent(hosts) - before) / (4 * count) < 0.27
    of_host = torch.empty(count)
    dist.reduce_scatter_tensor(of_host, gradient(square()), group=shards)
    want = gs.all_reduce(of_host / 2, codec=CODEC, op="mean", group=hosts)
    assert_bits(layer.weight.grad.to_local().flatten(), want)
    assert not isinstance(shards._get_backend(CPU), gs._C.CodecBackend)


def test_tensor_parallel_activations_stay_exact_beside_encoded_gradients() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def build(exact: bool) -> nn.Module:
        mesh = grid("data", "tensor", exact=exact)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return fully_shard(parallelize_module(network(), mesh["tensor"], plan), mesh=mesh["data"])

    of_replica = dist.get_rank() // 2
    data = grid("data", "tensor", exact=False)["data"].get_group()
    assert_bits(build(False)(batch(0, of_replica)), build(True)(batch(0, of_replica)))
    before = sent(data)
    train_near_and_not_equal(build(False), build(True), of_replica)
    assert sent(data) > before


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_lightnings_own_ddp_has_the_bits_of_ddp() -> None:
    """Lightning takes the default group as it is if the group exists before the Trainer starts."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def on_train_end(self) -> None:
            assert type(self.trainer.strategy.model) is DistributedDataParallel

        def training_step(self, x: Tensor, index: int) -> Tensor:
            return loss_of(self.net, x)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    module = Module()
    data = DataLoader([batch(step) for step in range(STEPS)], batch_size=None)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=SIZE,
        strategy=DDPStrategy(process_group_backend="gossamer"),
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    assert_bits(flat(module), ddp_weights())


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_accelerates_own_ddp_has_the_bits_of_ddp() -> None:
    """Accelerate takes the default group as it is if the group exists before the Accelerator."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(cpu=True)
    try:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        assert type(wrapped) is DistributedDataParallel
        for step in range(STEPS):
            optimizer.zero_grad()
            accelerator.backward(loss_of(wrapped, batch(step)))
            optimizer.step()
        assert_bits(flat(model), ddp_weights())
    finally:
        AcceleratorState._reset_state(True)


def test_a_sharded_checkpoint_is_exact_also_with_a_codec_for_gathers() -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sharded(line(gs.BF16()))
        return model, torch.optim.Adam(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        optimizer.zero_grad()
        loss_of(model, batch(index)).backward()
        optimizer.step()

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    saved, resumed = build(), build()
    step(*saved, 0)
    state = dict(zip(("model", "optimizer"), get_state_dict(*saved), strict=True))
    checkpoint.save(state, checkpoint_id=folder[0])
    blank = dict(zip(("model", "optimizer"), get_state_dict(*resumed), strict=True))
    checkpoint.load(blank, checkpoint_id=folder[0])
    set_state_dict(*resumed, model_state_dict=blank["model"], optim_state_dict=blank["optimizer"])
    for _ in range(2):
        for one, other in zip(saved[0].parameters(), resumed[0].parameters(), strict=True):
            assert_bits(one.to_local(), other.to_local())
        step(*saved, 1)
        step(*resumed, 1)


def test_dtensor_moves_exactly_and_sums_through_the_codec() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, rank = line(), dist.get_rank()
    whole = noise(3, (64, 128))
    before = sent(mesh.get_group())
    by_rows = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    by_columns = by_rows.redistribute(mesh, [Shard(1)])
    assert_bits(by_columns.to_local(), whole.chunk(SIZE, 1)[rank])
    assert_bits(by_columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    counted = DTensor.from_local(values(rank, (64, 128), torch.int64), mesh, [Partial()]).full_tensor()
    assert_bits(counted, sum(values(r, (64, 128), torch.int64) for r in range(SIZE)))
    assert sent(mesh.get_group()) == before
    mine = noise(rank, (64, 128))
    total = DTensor.from_local(mine, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local()
    assert_bits(total, gs.all_reduce(mine.clone(), codec=CODEC))


def test_object_collectives_are_exact() -> None:
    rank, before = dist.get_rank(), sent(dist.group.WORLD)
    every: list[Any] = [None] * SIZE
    dist.all_gather_object(every, {"rank": rank, "noise": noise(rank, (1000,))})
    for source, one in enumerate(every):
        assert_bits(one["noise"], noise(source, (1000,)))
    sent_list = [noise(7, (1000,)) if rank == 0 else None]
    dist.broadcast_object_list(sent_list)
    assert_bits(sent_list[0], noise(7, (1000,)))
    assert sent(dist.group.WORLD) == before
