"""LocalSGD whose ranks average with a few peers, as in NoLoCo, against a reference by hand."""

import copy
import functools
import threading

import pytest
import torch

import gossamer as gs
from gossamer.comm import gather_numbers
from gossamer.engine.agree import mean_tensors
from gossamer.topology import RandomPairs, mixing_matrix, resolve
from tests.support.models import batches, flat_weights, mlp, relative_error, seeded, shard
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap

NOLOCO = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.5)
STEPS, PERIOD = 15, 3


def train(comm, algorithm, count=STEPS):
    model, optimizer = wrap(comm, algorithm)
    for batch in batches(count):
        step(model, optimizer, shard(batch, comm))
    weights = flat_weights(model.module)
    model.close()
    return weights


def reference(size, topology, outer):
    """Every rank's weights at the end. a <- outer(a, a - mean of the peers' x), where a is the rank's own anchor."""
    models = [seeded(mlp) for _ in range(size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    anchors = [[param.detach().clone() for param in model.parameters()] for model in models]
    outers = [outer(anchor) for anchor in anchors] if outer is not None else None
    for number, batch in enumerate(batches(STEPS), start=1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, batch.chunk(size)[rank])
        if number % PERIOD:
            continue
        matrix = torch.tensor(mixing_matrix(topology, number // PERIOD - 1, size))
        for position in range(len(anchors[0])):
            held = torch.stack([list(model.parameters())[position].detach() for model in models])
            means = torch.tensordot(matrix, held, 1)
            for anchor, mean in zip(anchors, means, strict=True):
                anchor[position].grad = anchor[position] - mean
                if outers is None:
                    anchor[position].copy_(mean)
        for rank, model in enumerate(models):
            if outers is not None:
                outers[rank].step()
            for param, anchor in zip(model.parameters(), anchors[rank], strict=True):
                param.data.copy_(anchor)
    return [flat_weights(model) for model in models]


@pytest.mark.parametrize("outer", [None, NOLOCO], ids=["mean", "noloco"])
@pytest.mark.parametrize("name", ["random_pairs", "ring", "one_peer_exponential", "all"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.usefixtures("backend")
def test_each_rank_moves_its_own_anchor_to_the_mean_of_its_peers(size, name, outer):
    def body(comm):
        return train(comm, gs.LocalSGD(PERIOD, outer, topology=name))

    for found, expected in zip(run_ranks(size, body), reference(size, resolve(name), outer), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_with_equal_anchors_and_the_mean_of_all_it_is_diloco():
    diloco = run_ranks(3, lambda comm: train(comm, gs.LocalSGD(PERIOD, NOLOCO)))
    found = run_ranks(3, lambda comm: train(comm, gs.LocalSGD(PERIOD, NOLOCO, topology="all")))
    torch.testing.assert_close(found[0], diloco[0], rtol=1e-4, atol=1e-5)


def test_a_rank_waits_for_its_peer_alone():
    seed = next(seed for seed in range(99) if RandomPairs(seed).mixing(0, 4, 0).exchanges[0].to == 1)
    averaged = threading.Barrier(4)

    def body(comm):
        model, optimizer = wrap(comm, gs.LocalSGD(2, NOLOCO, topology=RandomPairs(seed)))
        if comm.rank > 1:  # the other pair begins to train when this pair has averaged
            averaged.wait(20)
        for batch in batches(2):
            step(model, optimizer, shard(batch, comm))
        if comm.rank < 2:
            averaged.wait(20)
        weights = flat_weights(model.module)
        model.close()
        return weights

    first, second, third, fourth = run_ranks(4, body)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert relative_error(first, third) > 1e-3


@pytest.mark.parametrize("outer", [None, NOLOCO], ids=["mean", "noloco"])
def test_alone_averagings_and_then_the_mean_of_all_are_diloco(outer):
    """As in a group that has lost a rank: see gossamer/regroup/peers.py."""

    def body(comm):
        algorithm = gs.LocalSGD(PERIOD, outer, topology="random_pairs")
        model, optimizer = wrap(comm, algorithm)
        algorithm.average_alone_until(STEPS)
        for number, batch in enumerate(batches(STEPS), start=1):
            step(model, optimizer, shard(batch, comm))
            if number % PERIOD == 0:
                algorithm.average_all(lambda tensors: mean_tensors(comm, tensors))
        weights = flat_weights(model.module)
        model.close()
        return weights

    diloco = run_ranks(3, lambda comm: train(comm, gs.LocalSGD(PERIOD, outer)))
    for found, expected in zip(run_ranks(3, body), diloco, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_ranks_hear_what_all_said_in_the_averaging_before():
    def body(comm):
        algorithm = gs.LocalSGD(1, topology="random_pairs")
        model, optimizer = wrap(comm, algorithm)
        heard = []

        def ask():
            said = len(heard)
            return lambda group: gather_numbers(group, group.rank, said)

        algorithm.survive(ask)
        for batch in batches(3):
            step(model, optimizer, shard(batch, comm))
            heard.append(algorithm.heard)
        algorithm.hear_all()
        model.close()
        return heard

    for heard in run_ranks(3, body):
        assert heard == [[], [[0, 0], [1, 0], [2, 0]], [[0, 1], [1, 1], [2, 1]]]


@pytest.mark.parametrize(
    "options", [{}, {"fragments": 2, "delay": 1, "merge": 0.5}, {"outer_optimizer": None, "delay": 2}]
)
def test_it_resumes_bit_for_bit(options):
    def body(comm, other, third):
        def wrapped(group, **more):
            algorithm = gs.LocalSGD(PERIOD, **{"outer_optimizer": NOLOCO, **options}, topology="random_pairs")
            return wrap(group, algorithm, **more)

        def go_on(group, model, optimizer, steps):
            for batch in batches(14)[steps]:
                step(model, optimizer, shard(batch, group))

        model, optimizer = wrapped(comm)
        go_on(comm, model, optimizer, slice(0, 14))
        expected = flat_weights(model.module)
        model.close()
        model, optimizer = wrapped(other)
        go_on(other, model, optimizer, slice(0, 7))
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), model.algorithm_state_dict()])
        model.close()
        model, optimizer = wrapped(third, seed=7, broadcast=False)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        model.load_algorithm_state_dict(saved[2])
        go_on(third, model, optimizer, slice(7, 14))
        resumed = flat_weights(model.module)
        model.close()
        return expected, resumed

    for expected, resumed in run_ranks(3, body, groups=3):
        assert torch.equal(expected, resumed)


def test_the_random_walk_of_anchors_stays_together_and_consensus_makes_them_equal():
    def body(comm):
        model, optimizer = wrap(comm, gs.LocalSGD(2, NOLOCO, topology="random_pairs"))
        for batch in batches(40):
            step(model, optimizer, shard(batch, comm))
        apart = flat_weights(model.module)
        model.consensus()
        (bucket,) = model.engine.buckets
        agreed, anchor = flat_weights(model.module), bucket.flat("anchor").clone()
        assert torch.equal(bucket.flat("weight"), anchor)
        model.close()
        return apart, agreed

    results = run_ranks(4, body)
    for apart, agreed in results:
        assert torch.equal(agreed, results[0][1])
        assert relative_error(apart, agreed) < 0.1
    assert relative_error(results[0][0], results[3][0]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"codec": gs.Int8()},
            "send their weights, which no codec fits, got topology='random_pairs' and codec=Int8",
        ),
        (
            {"topology": "torus"},
            "topology: must be a Topology or one of all, ring, .*random_pairs, got 'torus'",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(gs.ConfigError, match=message):
        gs.LocalSGD(4, **{"topology": "random_pairs", **options})


def test_counted_samples_are_refused():
    def body(comm):
        model, _ = wrap(comm, gs.LocalSGD(4, topology="random_pairs"))
        with pytest.raises(gs.ConfigError, match=r"count: LocalSGD\(.*topology=RandomPairs\(seed=0\)"):
            model.count(3)
        model.close()

    run_ranks(2, body)
