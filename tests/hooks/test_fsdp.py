"""gossamer.fsdp: FSDP2's reduce-scatter, all-gather and the all-reduce between replicas, through codecs, on the CPU.

Ranks are processes, because fully_shard needs torch's default group.
"""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gossamer as gs
from gossamer import planner
from gossamer.comm import from_group
from tests.support.jobs import Job
from tests.support.models import mlp

in_job = pytest.mark.usefixtures("job")

STEPS = 30
SIZE = 4


@pytest.fixture(scope="module")
def job():
    with Job(SIZE) as job, job.within(dist.init_process_group, dist.destroy_process_group, backend="gloo"):
        yield job


@cache
def world():
    return init_device_mesh("cpu", (SIZE,))


@cache
def grid():
    """Two replicas, of two shards each."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@cache
def text():
    """[steps, ranks, length]; the next number is learnt from the one before."""
    first = torch.randint(64, (40, SIZE, 1), generator=torch.Generator().manual_seed(1))
    return (first + 5 * torch.arange(33)) % 64


def network():
    def layer():
        return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))

    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 48), layer(), layer(), nn.Linear(48, 64))


def sharded(mesh, **policy):
    model = network()
    for part in model[1:3]:
        fully_shard(part, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def loss_of(model, step):
    rows = text()[step, dist.get_rank() :][:1]
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def last_loss(model, steps=STEPS):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / SIZE


@cache
def exact_loss():
    return last_loss(sharded(world()))


def sent_per_step(group, model, exact=None, **settings):
    """Returns the bytes that each step sends in the group. The loss must end within a hundredth of the exact one."""
    exact = exact_loss() if exact is None else exact
    gs.fsdp.compress(model, **settings)
    comm = from_group(group, "cpu")
    before = comm.bytes_sent
    loss = last_loss(model)
    assert abs(loss - exact) < 0.01 * exact, (loss, exact)
    return (comm.bytes_sent - before) / STEPS


def exact_bytes():
    """What a rank sends when it reduce-scatters, or gathers, all parameters in float32."""
    return sum(param.numel() for param in network().parameters()) * 4 * (SIZE - 1) / SIZE


@in_job
def test_the_exact_run_learns():
    start = last_loss(sharded(world()), steps=1)
    assert exact_loss() < 0.8 * start, (exact_loss(), start)


@in_job
def test_int8_gradients_and_bf16_weights_send_less():
    sent, four = sent_per_step(world().get_group(), sharded(world()), codec=gs.Int8()), exact_bytes()
    assert sent < 0.27 * four + 2 * 0.51 * four, (sent, four)  # one reduce-scatter, two all-gathers


@in_job
@pytest.mark.parametrize("weights", [gs.BF16(), gs.Delta(gs.Int4())], ids=str)
def test_the_planner_counts_the_bytes_of_both_codecs(weights):
    is_delta = isinstance(weights, gs.Delta)
    options = gs.Options(gs.Int8(), gather_codec=None if is_delta else weights, min_bytes=0)
    # What is not in the two blocks is the root, which stays gathered between forward and backward.
    names, parameters = zip(*network().named_parameters(), strict=True)
    names = tuple(name if name[0] in "12" else "root" for name in names)
    found = planner.predict(
        planner.Problem(parameters, names, 0.1),
        planner.Network(SIZE),
        planner.Sharded(options=options, weights=weights if is_delta else None),
    )
    model = sharded(world())
    gs.fsdp.compress(model, gs.Int8(), weights=weights)
    last_loss(model, steps=1)  # the first gather of a Delta is exact
    comm = from_group(world().get_group(), "cpu")
    before = comm.bytes_sent
    last_loss(model, steps=2)
    assert (comm.bytes_sent - before) / 2 == pytest.approx(found.bytes_per_rank, rel=1e-3)


@in_job
def test_gradients_alone_go_through_a_codec():
    settings = {"codec": gs.Int8(stochastic=True), "weights": None}
    sent, four = sent_per_step(world().get_group(), sharded(world()), **settings), exact_bytes()
    assert 0.2 * four < sent < 0.27 * four, (sent, four)


@in_job
def test_weights_alone_go_through_a_codec():
    sent_per_step(world().get_group(), sharded(world()), codec=None, weights=gs.Int8())


@in_job
def test_weights_go_as_differences_in_4_bits_once_a_step():
    delta = {"codec": gs.Int8(), "weights": gs.Delta(gs.Int4())}
    sent, four = sent_per_step(world().get_group(), sharded(world()), **delta), exact_bytes()
    assert 0.4 * four < sent < (0.27 + 0.15 + 1 / STEPS) * four, (sent, four)  # the first gather is exact


@in_job
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_backward_takes_the_weights_of_forward_and_what_was_left_out_comes_with_the_next(precision):
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=precision)}
    model, exact = sharded(world(), **policy), sharded(world(), **policy)
    gs.fsdp.compress(model, None, weights=gs.Delta(gs.Int4()))
    comm = from_group(world().get_group(), "cpu")
    loss_of(model, 0).backward()
    with torch.no_grad():
        for param, other in zip(model.parameters(), exact.parameters(), strict=True):
            shard = param.to_local()
            shard.add_(torch.randn(shard.shape, generator=torch.Generator().manual_seed(9)), alpha=0.1)
            other.to_local().copy_(shard)
    row = text()[0, :1]
    expected, gaps, sent = exact(row), [], []
    for _ in range(8):
        sent.append(comm.bytes_sent)
        out = model(row)
        sent.append(comm.bytes_sent)
        out.sum().backward()
        assert comm.bytes_sent == sent[-1] > sent[-2], "backward sends nothing"
        gaps.append((out - expected).abs().max().item())
        every = gs.all_gather(out.detach())
        assert all(torch.equal(other, every[:1]) for other in every.split(1)), "the ranks have equal weights"
    assert gaps[-1] < gaps[0] / 10, gaps


@in_job
def test_differences_are_of_each_replica_and_a_second_call_gathers_exactly():
    model, exact = sharded(grid()), sharded(grid())
    gs.fsdp.compress(model, None, weights=gs.Delta(gs.Int4()))
    last_loss(model, steps=2)
    with torch.no_grad():
        for param, other in zip(model.parameters(), exact.parameters(), strict=True):
            other.to_local().copy_(param.to_local())
    rounded, expected = loss_of(model, 5), loss_of(exact, 5)
    assert rounded.item() != expected.item()
    rounded.backward()  # until then FSDP keeps the root's weights gathered
    gs.fsdp.compress(model, None, weights=gs.Delta(gs.Int4()))
    assert loss_of(model, 5).item() == expected.item()


@in_job
def test_replicas_average_through_the_codec_and_stay_equal():
    model, between = sharded(grid()["shard"]), grid()["replicate"].get_group()
    sent = sent_per_step(between, model, codec=gs.Int8(), replicate=between) / 2
    shard = exact_bytes() / 4 * SIZE / (SIZE - 1)
    assert 0.2 * shard < sent < 0.3 * shard * 2, (sent, shard)
    for param in model.parameters():
        every = [torch.empty_like(param.to_local()) for _ in range(2)]
        dist.all_gather(every, param.to_local().detach(), group=between)
        assert torch.equal(*every)


@in_job
def test_mixed_precision_trains_through_a_codec():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact = last_loss(sharded(world(), mp_policy=policy))
    sent_per_step(world().get_group(), sharded(world(), mp_policy=policy), exact, codec=gs.Int8())


@in_job
def test_the_gradient_divide_factor_holds():
    summed, alone = sharded(world()), sharded(world())
    gs.fsdp.compress(summed, gs.Identity(), weights=None)
    for part in [*summed[1:3], summed]:
        part.set_gradient_divide_factor(2.0)
    for model in (summed, alone):
        loss_of(model, 0).backward()
    for one, mean in zip(summed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), SIZE / 2 * mean.grad.to_local(), rtol=1e-4, atol=1e-6)


@cache
def encoded_grid(hosts, shards=None):
    """grid() with options for the groups of its axes. Other names, or torch would use the groups of grid()."""
    override = {"hosts": ("gossamer", hosts), "shards": ("gossamer", shards)}
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "shards"), backend_override=override)


HALF = 2 * sum(
    param.numel() for param in network().parameters()
)  # bytes that an axis of a grid exchanges exactly


@in_job
def test_a_mesh_with_a_replicate_axis_is_encoded_on_both_axes():
    model, between = sharded(grid()), from_group(grid()["replicate"].get_group(), "cpu")
    before = between.bytes_sent
    sent = sent_per_step(grid()["shard"].get_group(), model, codec=gs.Int8(), weights=None)
    assert 0.2 * HALF < sent < 0.27 * HALF, (sent, HALF)
    assert 0.2 * HALF < (between.bytes_sent - before) / STEPS < 0.27 * HALF


@in_job
def test_compress_has_the_bits_of_options_in_the_groups_of_the_mesh():
    options = gs.Options(gs.Int8(), gather_codec=gs.BF16(), min_bytes=0)
    stock, compressed = sharded(encoded_grid(options, options)), sharded(grid())
    for _ in range(2):  # the second call replaces the first
        gs.fsdp.compress(compressed, gs.Int8(), weights=gs.BF16())
    for model in (stock, compressed):
        last_loss(model, steps=2)
    for one, other in zip(stock.parameters(), compressed.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


@in_job
def test_replicas_of_a_mesh_keep_the_divide_factor_and_every_codec():
    summed, alone = sharded(grid()), sharded(grid())
    gs.fsdp.compress(summed, gs.TopK(1.0), weights=None)  # a codec written in Python, which sends everything
    for part in [*summed[1:3], summed]:
        part.set_gradient_divide_factor(2.0)
    for model in (summed, alone):
        loss_of(model, 0).backward()
    for one, mean in zip(summed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), SIZE / 2 * mean.grad.to_local(), rtol=1e-4, atol=1e-6)


@in_job
def test_a_replicate_axis_with_options_keeps_them():
    mesh = encoded_grid(gs.Options(gs.Int4(), min_bytes=1024))
    model, between = sharded(mesh), mesh["hosts"].get_group()
    with pytest.raises(gs.ConfigError, match="whose mesh has a replicate axis.* leave out replicate="):
        gs.fsdp.compress(model, codec=gs.Int8(), replicate=between)
    codec_comm = between._get_backend(torch.device("cpu")).comm
    before = codec_comm.bytes_sent
    gs.fsdp.compress(model, gs.Int8(), weights=None)
    last_loss(model, steps=2)
    assert 0.1 * HALF < (codec_comm.bytes_sent - before) / 2 < 0.15 * HALF


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "no module of the model is sharded"),
        ({"codec": None, "weights": None}, "give a codec for gradients or for weights, got None for both"),
        (
            {"codec": gs.ErrorFeedback(gs.Int8())},
            "codec must be a Codec without error feedback, or None, got Error",
        ),
        ({"weights": "bf16"}, "weights must be a Codec without error feedback, or None, got 'bf16'"),
        ({"codec": gs.Delta(gs.Int4())}, r"codec must be a Codec .* or None, got Delta\(Int4"),
        ({"replicate": 3}, "replicate must be a process group or None, got 3"),
    ],
)
def test_compress_refuses_what_it_cannot_do(settings, text):
    with pytest.raises(gs.ConfigError, match=text):
        gs.fsdp.compress(mlp(), **settings)


@pytest.mark.parametrize("codec", [gs.ErrorFeedback(gs.Int4()), "int4", gs.Delta(gs.Int4())], ids=str)
def test_differences_need_a_codec_without_error_feedback(codec):
    with pytest.raises(gs.ConfigError, match="Delta: codec must be a Codec without error feedback, got"):
        gs.Delta(codec)
