"""What single algorithms promise beyond the contract that all keep to."""

import functools
import itertools
import time

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer.topology import consensus_steps, resolve
from models import batches, flat_weights, mlp, relative_error, seeded, shard, square
from ranks import run_ranks

DILOCO = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def wrap(comm, algorithm, *, lr=0.1, seed=0, build=mlp, **options):
    module = seeded(build, seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    return gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=comm, **options), optimizer


def step(model, optimizer, batch):
    optimizer.zero_grad()
    square(model(batch)).backward()
    optimizer.step()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("topology", ["all", "base_graph", "one_peer_exponential", "shift_one", "ring"])
def test_without_learning_ranks_reach_consensus_in_the_rounds_that_the_topology_says(topology, size):
    rounds = consensus_steps(resolve(topology), size, limit=15)

    def body(comm):
        model, optimizer = wrap(comm, gs.Decentralized(topology), lr=0.0, seed=comm.rank, broadcast=False)
        start = flat_weights(model.module)
        spread = []
        for batch in batches(8):
            step(model, optimizer, batch)
            spread.append(flat_weights(model.module))
        model.close()
        return start, spread

    results = run_ranks(size, body)
    mean = sum(start for start, _ in results) / size
    for number in range(8):
        apart = max(relative_error(spread[number], mean) for _, spread in results)
        agreed = rounds is not None and number + 1 >= rounds
        assert (apart < 1e-6) == agreed, f"{apart} after {number + 1} rounds"


def test_decentralized_sends_its_weights_once_a_step_and_nothing_else_but_agreements():
    def body(comm):
        model, optimizer = wrap(comm, gs.Decentralized("shift_one"), build=lambda: nn.Linear(512, 256))
        before = model.engine.bytes_sent
        for batch in batches(4, width=512):
            step(model, optimizer, batch)
        sent, numel = model.engine.bytes_sent - before, sum(bucket.numel for bucket in model.engine.buckets)
        model.close()
        return sent / (4 * numel * 4)

    assert all(1.0 <= share < 1.01 for share in run_ranks(2, body))


@pytest.mark.parametrize(
    "codec", [gs.Int8(32), gs.MinMaxUInt8(), gs.Int4(), gs.OneBit(), gs.TopK(0.2)], ids=str
)
def test_copies_of_a_neighbours_weights_stay_equal_to_them_bit_for_bit(codec):
    def body(comm):
        model, optimizer = wrap(
            comm, gs.LowPrecisionDecentralized(codec, gamma=0.4), seed=comm.rank, broadcast=False
        )
        for batch in batches(12):
            step(model, optimizer, shard(batch, comm))
        (bucket,) = model.engine.buckets
        fields = {name: bucket.flat(name).clone() for name in bucket.fields}
        model.close()
        return fields

    results = run_ranks(3, body)
    for rank, fields in enumerate(results):
        assert torch.equal(fields["weight"], fields["replica"])
        copies = [fields["replica_0"], fields["replica_1"]]
        for neighbour in (rank - 1, (rank + 1) % 3):
            assert any(torch.equal(copy, results[neighbour]["weight"]) for copy in copies)


def test_a_topology_that_changes_is_refused_where_copies_of_peers_are_kept():
    def body(comm):
        for topology in ("all", "one_peer_exponential", "base_graph"):
            with pytest.raises(gs.ConfigError, match="must be a graph that stays as it is"):
                wrap(comm, gs.LowPrecisionDecentralized(topology=topology))

    run_ranks(3, body)


def test_weights_may_be_loaded_and_replaced_between_steps():
    def body(comm):
        model, optimizer = wrap(comm, gs.Decentralized("all"), lr=0.0)
        other = seeded(mlp, seed=5)
        step(model, optimizer, batches(1)[0])
        model.load_state_dict(other.state_dict())
        step(model, optimizer, batches(1)[0])
        loaded = flat_weights(model.module)
        for param in model.module.parameters():
            param.data = param.data.clone() * 2  # as moving averages of weights are swapped in
        step(model, optimizer, batches(1)[0])
        replaced = flat_weights(model.module)
        model.close()
        return loaded, replaced

    expected = flat_weights(seeded(mlp, seed=5))
    for loaded, replaced in run_ranks(2, body):
        torch.testing.assert_close(loaded, expected)
        torch.testing.assert_close(replaced, 2 * expected)


# --- LocalSGD ---


def local_reference(size, period, outer, steps):
    """Local SGD by hand, in one process: every rank's model, and the outer optimizer on their anchor."""
    models = [seeded(mlp) for _ in range(size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    anchor = [param.detach().clone() for param in models[0].parameters()]
    outer_optimizer = outer(anchor) if outer is not None else None
    for number, batch in enumerate(batches(steps)):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, batch.chunk(size)[rank])
        if (number + 1) % period:
            continue
        for position, kept in enumerate(anchor):
            mean = sum(list(model.parameters())[position].detach() for model in models) / size
            kept.grad = kept - mean
            if outer_optimizer is None:
                kept.copy_(mean)
        if outer_optimizer is not None:
            outer_optimizer.step()
        for model in models:
            for param, kept in zip(model.parameters(), anchor, strict=True):
                param.data.copy_(kept)
    return [flat_weights(model) for model in models]


@pytest.mark.parametrize("outer", [None, DILOCO], ids=["mean", "diloco"])
@pytest.mark.parametrize("size", [2, 3])
def test_local_sgd_is_training_alone_between_steps_of_the_outer_optimizer(size, outer):
    def body(comm):
        model, optimizer = wrap(comm, gs.LocalSGD(4, outer))
        for batch in batches(14):
            step(model, optimizer, shard(batch, comm))
        weights = flat_weights(model.module)
        model.close()
        return weights

    for found, expected in zip(run_ranks(size, body), local_reference(size, 4, outer, 14), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_local_sgd_sends_a_periods_share_of_what_averaging_every_step_does():
    def bytes_of(steps=12, **settings):
        def body(comm):
            model, optimizer = wrap(comm, gs.LocalSGD(**settings), build=lambda: nn.Linear(512, 256))
            before = model.engine.bytes_sent
            for batch in batches(steps, width=512):
                step(model, optimizer, batch)
            sent = model.engine.bytes_sent - before
            model.close()
            return sent

        return run_ranks(2, body)[0]

    every_step = bytes_of(period=1)
    assert bytes_of(period=4) * 4 == every_step
    assert bytes_of(steps=14, period=4, delay=2) * 4 == every_step
    assert bytes_of(period=4, codec=gs.BF16()) * 8 == pytest.approx(every_step, rel=0.01)


def test_fragments_take_turns_and_a_delayed_mean_is_merged_when_it_is_due():
    def body(comm):
        algorithm = gs.LocalSGD(4, fragments=2, delay=1, merge=0.25)
        model, optimizer = wrap(
            comm, algorithm, lr=0.0, seed=comm.rank, broadcast=False, bucket_bytes=600, first_bucket_bytes=600
        )
        apart = []
        for batch in batches(8):
            step(model, optimizer, batch)
            apart.append([bucket.flat("weight").clone() for bucket in model.engine.buckets])
        model.close()
        return apart

    first, second = run_ranks(2, body)
    distances = [
        [(a - b).norm().item() for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(first, second, strict=True)
    ]
    ratios = [
        [round(now / before, 3) for before, now in zip(*pair, strict=True)]
        for pair in itertools.pairwise(distances)
    ]
    count = len(ratios[0])
    assert count >= 2
    for number, ratio in enumerate(ratios, start=2):  # ratio of the distance after step `number`
        due = {0: 1, 2: 3}  # fragment 0 is sent at steps 4, 8 and taken at 5, 9; fragment 1 at 2, 6 and 3, 7
        expected = [
            0.75 if number % 4 == due[2 * (bucket % 2)] and number >= 3 else 1.0 for bucket in range(count)
        ]
        assert ratio == expected, f"step {number}"


# --- PowerSGD ---


def test_powersgd_is_exact_for_gradients_of_its_rank():
    def body(comm):
        layer = nn.Linear(40, 30, bias=False)
        model = gs.DataParallel(
            layer, torch.optim.SGD(layer.parameters(), lr=0.0), algorithm=gs.PowerSGD(2), process_group=comm
        )
        generator = torch.Generator().manual_seed(comm.rank)
        left = torch.randn(
            30, 1, generator=torch.Generator().manual_seed(9)
        )  # the same on all ranks: rank 1 in sum
        right = torch.randn(1, 40, generator=generator)
        for _ in range(2):
            layer.zero_grad()
            (model(torch.eye(40)) * (left @ right).T).sum().backward()
        return layer.weight.grad.clone(), left @ right

    results = run_ranks(3, body)
    mean = sum(own for _, own in results) / 3
    for grad, _ in results:
        assert relative_error(grad, mean) < 1e-5


def test_what_powersgd_leaves_out_arrives_later():
    def body(comm):
        layer = nn.Linear(40, 30, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        model = gs.DataParallel(layer, optimizer, algorithm=gs.PowerSGD(1), process_group=comm)
        target = torch.randn(40, 30, generator=torch.Generator().manual_seed(comm.rank))
        total, rounds = torch.zeros(30, 40), 40
        for _ in range(rounds):
            layer.zero_grad()
            (model(torch.eye(40)) * target).sum().backward()
            total += layer.weight.grad
        (bucket,) = model.engine.buckets
        error = bucket.views("error")[0].clone()
        model.close()
        return total, error, target.T * rounds

    results = run_ranks(2, body)
    exact = sum(target for _, _, target in results) / 2
    left = sum(error for _, error, _ in results) / 2
    for total, _, _ in results:
        torch.testing.assert_close(total + left, exact, rtol=1e-3, atol=1e-2)


# --- asynchronous averaging ---


def test_a_rank_that_ends_early_blocks_nobody_and_the_others_go_on_averaging():
    def body(comm):
        algorithm = gs.AsyncModelAverage(sync_interval_ms=0)
        model, optimizer = wrap(comm, algorithm, lr=0.0, seed=comm.rank, broadcast=False)
        begun = time.monotonic()
        if comm.rank == 2:
            step(model, optimizer, batches(1)[0])
            model.close()  # returns when the others have closed
            return time.monotonic() - begun, flat_weights(model.module)
        for batch in batches(40):
            step(model, optimizer, batch)
            time.sleep(0.005)
        weights = flat_weights(model.module)
        took = time.monotonic() - begun
        model.close()
        return took, weights

    (first_s, first), (_, second), (_, third) = run_ranks(3, body)
    assert first_s < 15
    assert relative_error(first, second) < 1e-3
    assert relative_error(first, third) > 0.1


def test_an_aborted_rank_is_left_alone_and_may_join_again():
    def body(comm):
        algorithm = gs.AsyncModelAverage(sync_interval_ms=0)
        model, optimizer = wrap(comm, algorithm, lr=0.0, seed=comm.rank, broadcast=False)
        if comm.rank == 1:
            algorithm.abort()
        own = flat_weights(model.module)
        for batch in batches(20):
            step(model, optimizer, batch)
        alone = flat_weights(model.module)
        if comm.rank == 1:
            algorithm.resume()
        until = time.monotonic() + 20
        joined = False
        while not joined and time.monotonic() < until:
            step(model, optimizer, batches(1)[0])
            time.sleep(0.002)
            joined = relative_error(flat_weights(model.module), own) > 1e-3
        model.close()
        return relative_error(alone, own), joined

    results = run_ranks(2, body)
    assert results[1][0] == 0.0
    assert all(joined for _, joined in results)


# --- arguments ---


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: gs.Decentralized(interval=0), "interval must be a positive number of steps, got 0"),
        (lambda: gs.Decentralized("star"), "star"),
        (lambda: gs.LowPrecisionDecentralized(gamma=1.5), "gamma must be above 0 and at most 1, got 1.5"),
        (lambda: gs.LowPrecisionDecentralized("int8"), "codec must be a Codec or None, got 'int8'"),
        (lambda: gs.LowPrecisionDecentralized(gs.ErrorFeedback(gs.Int8())), "must round to nearest"),
        (lambda: gs.LocalSGD(0), "period must be a positive number of steps, got 0"),
        (lambda: gs.LocalSGD(4, fragments=5), "fragments must be 1 to the period, 4, got 5"),
        (lambda: gs.LocalSGD(4, delay=4), "delay must be 0 to less than the period, 4, got 4"),
        (lambda: gs.LocalSGD(4, merge=0), "merge must be above 0 and at most 1, got 0"),
        (lambda: gs.PowerSGD(0), "rank must be a positive integer, got 0"),
        (lambda: gs.PowerSGD(start_step=-1), "start_step must be a number of steps, got -1"),
        (lambda: gs.AsyncModelAverage(-1), "sync_interval_ms must not be negative, got -1"),
        (lambda: gs.AsyncModelAverage(warmup_steps=1.5), "warmup_steps must be a number of steps, got 1.5"),
        (lambda: gs.QAdam("int8"), "codec must be a Codec or None, got 'int8'"),
        (
            lambda: gs.QAdamOptimizer([torch.zeros(1)], warmup_steps=0),
            "warmup_steps must be a positive integer, got 0",
        ),
        (
            lambda: gs.QAdamOptimizer([torch.zeros(1)], betas=(0.9, 1.0)),
            "betas must be at least 0 and below 1",
        ),
        (lambda: gs.QAdamOptimizer([torch.zeros(1)], lr=-1.0), "must not be negative, got -1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_values(build, message):
    with pytest.raises(gs.ConfigError, match=message.replace("(", r"\(")):
        build()


def test_wrapping_without_the_optimizer_that_an_algorithm_needs_is_refused():
    def body(comm):
        with pytest.raises(gs.ConfigError, match="counts optimizer steps; give the optimizer"):
            gs.DataParallel(mlp(), algorithm="decentralized", process_group=comm)
        model = mlp()
        adam = torch.optim.Adam(model.parameters())
        with pytest.raises(gs.ConfigError, match=r"must be one QAdamOptimizer, got \['Adam'\]"):
            gs.DataParallel(model, adam, algorithm="qadam", process_group=comm)
        some = gs.QAdamOptimizer(list(model.parameters())[:2])
        with pytest.raises(gs.ConfigError, match=r"parameter '.*' is not in the optimizer"):
            gs.DataParallel(model, some, algorithm="qadam", process_group=comm)
        with pytest.raises(gs.ConfigError, match="3 fragments need as many buckets, got 1"):
            wrap(comm, gs.LocalSGD(4, fragments=3))

    run_ranks(1, body)


def test_an_algorithm_object_serves_one_model_at_a_time():
    def body(comm, other):
        algorithm = gs.AsyncModelAverage()
        with pytest.raises(gs.ConfigError, match="no model is wrapped"):
            algorithm.abort()
        model, _ = wrap(comm, algorithm)
        with pytest.raises(gs.ConfigError, match="this object serves another wrapped model"):
            wrap(other, algorithm)
        model.close()
        model, optimizer = wrap(other, algorithm)
        step(model, optimizer, batches(1)[0])
        model.close()

    run_ranks(1, body, groups=2)


def test_a_step_is_over_when_every_optimizer_has_stepped():
    def body(comm):
        module = seeded(mlp)
        params = list(module.parameters())
        optimizers = [torch.optim.SGD(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)]
        model = gs.DataParallel(module, optimizers, algorithm="decentralized", process_group=comm)
        counts = []
        for batch in batches(3):
            square(model(shard(batch, comm))).backward()
            for optimizer in optimizers:
                optimizer.step()
                counts.append(model.engine.optimizer_steps)
        model.close()
        return counts

    assert run_ranks(2, body) == [[0, 1, 1, 2, 2, 3]] * 2


def test_a_state_of_another_model_or_step_is_an_error_on_every_rank():
    def body(comm):
        model, optimizer = wrap(comm, "decentralized")
        step(model, optimizer, batches(1)[0])
        state = model.algorithm_state_dict()
        with pytest.raises(gs.ConfigError, match="the loaded state differs between ranks"):
            model.load_algorithm_state_dict({**state, "optimizer_steps": 1 + comm.rank})
        with pytest.raises(gs.ConfigError, match=r"unknown parameters \['other'\]"):
            model.load_algorithm_state_dict({**state, "plan": [["other"]]})
        with pytest.raises(gs.ConfigError, match="must be given what state_dict"):
            model.load_algorithm_state_dict({})
        model.load_algorithm_state_dict(state)
        step(model, optimizer, batches(1)[0])
        model.close()

    run_ranks(2, body)
