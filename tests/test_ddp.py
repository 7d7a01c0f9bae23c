"""gs.DistributedDataParallel beside torch's: signature, arguments, weights, buffers. Ranks are threads.

With two ranks a sum has one order, so the weights must have torch's bits. Communication hooks are in test_ddp_hooks.py,
uneven inputs in test_ddp_join.py, what needs a default group in test_ddp_processes.py.
"""

import inspect
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision

import gossamer as gs
from models import batches, flat_grads, flat_weights, mlp, relative_error, seeded, shard, square
from ranks import run_ranks
from stock import run_beside
from test_algorithm_contract import NAMES, TIMED, build, optimizer_of


class Net(nn.Module):
    """Batch normalisation; weights that are tied, frozen, in another memory format, in float64, of the root module."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.first, self.norm = nn.Linear(10, 16), nn.BatchNorm1d(16)
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16)
        self.third.weight = self.second.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.wide = nn.Linear(16, 3).double()

    def forward(self, x):
        x = self.norm(self.first(x * self.scale)).tanh()
        x = self.conv(x.view(-1, 4, 2, 2)).flatten(1)
        return {"out": self.wide(self.frozen(self.third(self.second(x))).double())}


def loss_of(output):
    return square(output["out"] if isinstance(output, dict) else output)


def wrap(kind, inner, comm, group, options):
    if kind is Stock:
        return Stock(inner, process_group=group, **options)
    return gs.DistributedDataParallel(inner, process_group=comm, **options)


def both(body, *arguments, size=2):
    """[(torch's, ours)] of body(wrap, comm, *arguments) on every rank."""

    def of_rank(comm, group):
        def wrapper(kind):
            return lambda inner, **options: wrap(kind, inner, comm, group, options)

        return [body(wrapper(kind), comm, *arguments) for kind in (Stock, gs.DistributedDataParallel)]

    return run_beside(size, of_rank)


def trained(wrap, comm, options, make=Net, steps=4, seed=None):
    inner = seeded(make, comm.rank if seed is None else seed)
    model = wrap(inner, **options)
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for batch in batches(steps):
        optimizer.zero_grad()
        loss_of(model(shard(batch, comm))).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(states):
    first, second = states
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_every_argument_of_torchs_is_taken_at_its_place_with_its_default():
    ours = list(inspect.signature(gs.DistributedDataParallel.__init__).parameters.values())
    theirs = list(inspect.signature(Stock.__init__).parameters.values())
    known = {each.name: each.default for each in ours}
    assert all(known[each.name] in (each.default, None) for each in theirs), known
    if "forward_sync_buffers" in inspect.signature(Stock.__init__).parameters:
        assert [each.name for each in ours[: len(theirs)]] == [each.name for each in theirs]
        assert [each.default for each in ours[: len(theirs)]] == [each.default for each in theirs]


OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.0005},
    {"bucket_cap_mb_list": [0.0002, 0.0005]},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"init_sync": False},
    {"forward_sync_buffers": False},
    {"broadcast_buffers": False},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    {"batched_grad_copy": True},
    {"dim": 0, "device_ids": None, "output_device": None},
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_and_buffers_have_torchs_bits(options):
    if set(options) - set(inspect.signature(Stock.__init__).parameters):
        pytest.skip("this torch has no such argument")
    seed = 0 if options.get("init_sync") is False else None
    assert all(equal(states) for states in both(trained, options, Net, 4, seed))


def test_with_three_ranks_weights_are_those_of_torch_but_for_the_order_of_sums():
    for theirs, ours in both(trained, {"bucket_cap_mb": 0.0005}, size=3):
        assert all(relative_error(ours[name], theirs[name]) < 1e-6 for name in theirs if "num" not in name)


def test_bucket_sizes_are_those_asked_for():
    def body(comm):
        sizes = []
        for options in ({"bucket_cap_mb": 0.0005}, {"bucket_cap_mb_list": [0.0001, 10]}, {}):
            model = gs.DistributedDataParallel(seeded(mlp), process_group=comm, **options)
            sizes.append([bucket.bytes for bucket in model.engine.buckets])
            model.close()
        return sizes

    small, listed, default = run_ranks(1, body)[0]
    assert len(small) == 2
    assert len(listed) == 2
    assert listed[0] < 1000
    assert len(default) == 1


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_has_the_bits_it_has_under_data_parallel(name):
    def body(comm, other):
        results = []
        for wrapper, group in ((gs.DataParallel, comm), (gs.DistributedDataParallel, other)):
            inner = seeded(mlp)
            optimizer = optimizer_of(name, inner.parameters())
            model = wrapper(inner, optimizer=optimizer, algorithm=build(name), process_group=group)
            for batch in batches(6):
                optimizer.zero_grad()
                square(model(shard(batch, comm))).backward()
                optimizer.step()
            if name in TIMED:
                model.consensus()
            model.close()
            results.append(flat_weights(inner))
        return results

    for first, second in (ranks := run_ranks(3, body, groups=2)):
        assert torch.equal(first, second) or name in TIMED
        assert torch.equal(second, ranks[0][1]) or name not in TIMED
        assert not torch.equal(second, flat_weights(seeded(mlp)))


def test_algorithms_by_name_and_their_optimizer_are_checked():
    def body(comm):
        with pytest.raises(gs.ConfigError, match=r"counts optimizer steps; give optimizer="):
            gs.DistributedDataParallel(mlp(), process_group=comm, algorithm="decentralized")
        with pytest.raises(gs.ConfigError, match="must be an Algorithm object or one of"):
            gs.DistributedDataParallel(mlp(), process_group=comm, algorithm="nonsense")
        with pytest.raises(gs.ConfigError, match="DistributedDataParallel: optimizer must be"):
            gs.DistributedDataParallel(mlp(), process_group=comm, optimizer=3)
        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm, algorithm="bytegrad")
        assert model.algorithm.name == "bytegrad"
        model.close()

    run_ranks(1, body)


def accumulated(wrap, comm, options):
    inner = seeded(mlp)
    model = wrap(inner, **options)
    seen = []
    for first, second, third in zip(*[iter(batches(6))] * 3, strict=True):
        inner.zero_grad()
        with model.no_sync():
            for batch in (first, second):
                square(model(shard(batch, comm))).backward()
            outside = square(model(shard(first, comm)))
        outside.backward()  # its forward was inside
        seen.append(flat_grads(inner))
        square(model(shard(third, comm))).backward()
        seen.append(flat_grads(inner))
    return seen


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_no_sync_goes_by_the_forward_as_with_torch(options):
    ranks = both(accumulated, options)
    for theirs, ours in ranks:
        assert all(map(torch.equal, theirs, ours))
    local, synced = ranks[0][1][0], ranks[0][1][1]
    assert not torch.equal(local, ranks[1][1][0])
    assert torch.equal(synced, ranks[1][1][1])


def test_a_static_graph_goes_on_reducing_after_no_sync():
    results = run_ranks(
        2,
        lambda comm: [
            accumulated(
                lambda inner, **_: gs.DistributedDataParallel(inner, process_group=comm, static_graph=True),
                comm,
                {},
            ),
        ],
    )
    plain = both(accumulated, {})
    for (static,), (theirs, _) in zip(results, plain, strict=True):
        assert all(map(torch.equal, static, theirs))


def two_forwards(wrap, comm):
    inner = seeded(Net)
    model = wrap(inner)
    inner.norm.momentum = 0.1 * (comm.rank + 1)
    first, second = (shard(batch, comm) for batch in batches(2))
    (loss_of(model(first)) + loss_of(model(second))).backward()
    model.eval()
    with torch.no_grad():
        model(first)
    evaluated = model.module.norm.running_mean.clone()
    with torch.no_grad():
        model.module.norm.running_mean += comm.rank
        model(first)  # after one without gradients: nothing is copied
    return flat_grads(inner), evaluated, model.module.norm.running_mean.clone()


def test_buffers_are_copied_when_torch_copies_them():
    ranks = both(two_forwards)
    for theirs, ours in ranks:
        assert all(map(torch.equal, theirs, ours))
    assert torch.equal(ranks[0][1][1], ranks[1][1][1])
    assert not torch.equal(ranks[0][1][2], ranks[1][1][2])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("options", "at_wrap", "before_forward"),
    [
        ({}, True, True),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False}, False, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
        ({"init_sync": False}, False, True),
    ],
    ids=str,
)
def test_buffers_of_rank_0_are_taken_at_wrap_and_before_forwards(options, at_wrap, before_forward):
    def body(comm):
        inner = seeded(Net)
        inner.norm.running_mean.fill_(comm.rank)
        model = gs.DistributedDataParallel(inner, process_group=comm, **options)
        wrapped = inner.norm.running_mean.sum().item()
        inner.norm.running_mean.fill_(comm.rank)
        model.eval()
        model(shard(batches(1)[0], comm))
        return wrapped == 0, inner.norm.running_mean.sum().item() == 0

    assert run_ranks(2, body)[1] == (at_wrap, before_forward)


def test_both_names_of_the_buffers_argument_warn():
    def body(comm):
        with pytest.warns(
            FutureWarning, match="its value is ignored when `forward_sync_buffers` is provided"
        ):
            model = gs.DistributedDataParallel(
                mlp(), process_group=comm, broadcast_buffers=False, forward_sync_buffers=True
            )
        assert model.broadcast_buffers
        model.close()

    run_ranks(1, body)


IGNORED = ["first.bias", "norm.running_mean"]


def ignoring(wrap, comm, kind, names):
    inner = seeded(Net, comm.rank)
    inner.norm.running_mean.fill_(comm.rank)
    kind._set_params_and_buffers_to_ignore_for_model(inner, names)
    return trained_of(wrap(inner), comm, inner)


def test_ignored_parameters_and_buffers_stay_each_ranks_own():
    def body(comm, group):
        return [
            ignoring(lambda inner, kind=kind: wrap(kind, inner, comm, group, {}), comm, kind, IGNORED)
            for kind in (Stock, gs.DistributedDataParallel)
        ]

    ranks = run_beside(2, body)
    assert all(equal(states) for states in ranks)
    first, second = ranks[0][1], ranks[1][1]
    assert [name for name in first if not torch.equal(first[name], second[name])] == IGNORED


def test_a_parameter_of_the_model_itself_may_be_ignored_under_torchs_name_for_it():
    def body(comm):
        kind = gs.DistributedDataParallel
        return ignoring(lambda inner: kind(inner, process_group=comm), comm, kind, [".scale"])["scale"]

    first, second = run_ranks(2, body)
    assert not torch.equal(first, second)


def trained_of(model, comm, inner):
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.1)
    for batch in batches(2):
        optimizer.zero_grad()
        loss_of(model(shard(batch, comm))).backward()
        optimizer.step()
    return {name: value.clone() for name, value in inner.state_dict().items()}


def test_delayed_parameters_travel_after_all_others():
    def body(comm, other):
        results = []
        for group, delays in ((comm, False), (other, True)):
            inner = seeded(mlp)
            options = {
                "delay_all_reduce_named_params": [("4.weight", inner[4].weight), ("2.bias", inner[2].bias)],
                "param_to_hook_all_reduce": inner[0].weight,
            }
            model = gs.DistributedDataParallel(inner, process_group=group, **(options if delays else {}))
            for batch in batches(2):
                inner.zero_grad()
                square(model(shard(batch, comm))).backward()
            results.append((flat_grads(inner), [set(bucket.names) for bucket in model.engine.buckets]))
            model.close()
        return results

    for (plain, _), (delayed, buckets) in run_ranks(2, body, groups=2):
        assert torch.equal(plain, delayed)
        assert buckets[-1] == {"4.weight", "2.bias"}
        assert all(not first & second for first, second in pairwise(buckets))


def test_mixed_precision_computes_in_16_bits_and_keeps_weights_in_32():
    def body(comm):
        inner = seeded(lambda: nn.Sequential(mlp(), nn.BatchNorm1d(5)))
        settings = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        model = gs.DistributedDataParallel(inner, process_group=comm, mixed_precision=settings)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        sent = model.engine.bytes_sent
        for batch in batches(3):
            optimizer.zero_grad()
            output = model(shard(batch, comm))
            assert output.dtype == torch.bfloat16
            square(output.float()).backward()
            optimizer.step()
        assert {param.dtype for param in inner.parameters()} == {torch.float32}
        assert all(param.grad.dtype == torch.float32 for param in inner.parameters())
        assert "BF16" in repr(model.algorithm)
        assert inner[1].num_batches_tracked == 3
        assert inner[1].running_mean.dtype == torch.bfloat16
        return flat_weights(inner), model.engine.bytes_sent - sent

    ranks = run_ranks(2, body)
    assert torch.equal(ranks[0][0], ranks[1][0])
    exact = run_ranks(
        2,
        lambda comm: flat_weights_of(
            comm, gs.DistributedDataParallel, lambda: nn.Sequential(mlp(), nn.BatchNorm1d(5))
        ),
    )
    assert 0 < relative_error(ranks[0][0], exact[0]) < 0.02


def flat_weights_of(comm, wrapper, make):
    inner = seeded(make)
    trained_of(wrapper(inner, process_group=comm), comm, inner)
    return flat_weights(inner)


def test_state_dicts_go_both_ways_between_torch_and_ours():
    def body(comm, group):
        theirs = Stock(seeded(Net, 1), process_group=group)
        ours = gs.DistributedDataParallel(seeded(Net, 2), process_group=comm)
        assert list(theirs.state_dict()) == list(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())
        assert equal((theirs.state_dict(), ours.state_dict()))
        third = Stock(seeded(Net, 3), process_group=group)
        third.load_state_dict(ours.state_dict())
        assert equal((third.state_dict(), ours.state_dict()))
        with pytest.raises(gs.ConfigError, match="is another object than the one that was wrapped"):
            ours.load_state_dict(seeded_state(), assign=True)
        ours.close()

    def seeded_state():
        return {f"module.{name}": value for name, value in seeded(Net).state_dict().items()}

    run_beside(2, body)


def test_it_passes_for_one_of_torchs():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(Net), process_group=comm, find_unused_parameters=True)
        assert isinstance(model, Stock)
        assert issubclass(gs.DistributedDataParallel, Stock)
        assert not isinstance(model.module, Stock)
        facts = model._get_ddp_logging_data()
        assert (facts["world_size"], facts["rank"], facts["module_name"]) == (1, 0, "Net")
        assert (facts["find_unused_parameters"], facts["iteration"]) == (1, 0)
        assert model.device == torch.device("cpu")
        assert model.device_type == "cpu"
        assert model.bucket_bytes_cap == 25 * 2**20
        # what Accelerate does to let a backward communicate whose forward was under no_sync()
        with model.no_sync():
            loss = loss_of(model(batches(1)[0]))
        model.reducer.prepare_for_forward()
        assert not model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        loss.backward()
        model.reducer._delay_all_reduce()
        assert model.engine.backward_count == 1
        model.close()

    run_ranks(1, body)
