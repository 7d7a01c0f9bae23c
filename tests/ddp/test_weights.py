"""gs.DistributedDataParallel beside torch's: signature, arguments, weights, buffers. Ranks are threads.

With two ranks a sum has one order, so the weights must have torch's bits. Arguments are in test_arguments.py,
which parameters a backward reaches in test_graph.py, communication hooks in test_hooks.py, uneven inputs in
test_join.py, what needs a default group in test_processes.py.
"""

import inspect

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.torch_version import TorchVersion

import gossamer as gs
from tests.algorithms.test_contract import NAMES, TIMED, build, optimizer_of
from tests.support.models import batches, flat_grads, flat_weights, mlp, relative_error, seeded, shard, square
from tests.support.ranks import run_ranks
from tests.support.stock import Net, both, equal, loss_of, run_beside, state_after, wrap


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
    {"lazy_bucket_allocation": True},
    {"dim": 0, "device_ids": None, "output_device": None},
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_and_buffers_have_torchs_bits(options):
    if set(options) - set(inspect.signature(Stock.__init__).parameters):
        pytest.skip("this torch has no such argument")
    seed = 0 if options.get("init_sync") is False else None
    assert all(equal(states) for states in both(state_after, options, Net, 4, seed))


def test_with_three_ranks_weights_are_those_of_torch_but_for_the_order_of_sums():
    for theirs, ours in both(state_after, {"bucket_cap_mb": 0.0005}, size=3):
        assert all(relative_error(ours[name], theirs[name]) < 1e-6 for name in theirs if "num" not in name)


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


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 12),
    reason="torch's own DDP before 2.12 fails here: it copies buffers over those that a backward needs",
)
def test_buffers_are_copied_when_torch_copies_them():
    ranks = both(two_forwards)
    for theirs, ours in ranks:
        assert all(map(torch.equal, theirs, ours))
    assert torch.equal(ranks[0][1][1], ranks[1][1][1])
    assert not torch.equal(ranks[0][1][2], ranks[1][1][2])


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
    assert [name for name in first if not torch.equal(first[name], second[name])] == [
        *IGNORED,
        "norm.running_var",  # of the last forward, which took rank 0's
    ]


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
