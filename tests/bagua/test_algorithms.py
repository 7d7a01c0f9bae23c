"""gossamer.bagua: with_bagua() and Bagua's own algorithms, on the native engine. Ranks are threads."""

import itertools
import threading
import time

import pytest
import torch

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api.algorithms import (
    Algorithm,
    GlobalAlgorithmRegistry,
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from tests.support.models import (
    batches,
    flat_grads,
    flat_weights,
    mlp,
    relative_error,
    seeded,
    shard,
    square,
    train,
)
from tests.support.ranks import run_ranks

NAMES = GlobalAlgorithmRegistry.available_algorithms()


def build(name, optimizer):
    if name == "qadam":
        return q_adam.QAdamAlgorithm(optimizer)
    if name == "async":
        return async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=2)
    return Algorithm.init(name)


def optimizer_of(name, model):
    if name == "qadam":
        return q_adam.QAdamOptimizer(model.parameters(), lr=0.03, warmup_steps=3)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(model, optimizer, comm, count=6, data=None):
    losses = []
    for batch in batches(count) if data is None else data:
        optimizer.zero_grad()
        loss = square(model(shard(batch, comm)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_trains_the_module_itself(name, size):
    def body(comm):
        module = seeded(mlp, seed=comm.rank)
        keys = list(module.state_dict())
        optimizer = optimizer_of(name, module)
        model = bagua.with_bagua(module, [optimizer], build(name, optimizer), process_group=comm)
        assert model is module
        assert list(model.state_dict()) == keys
        start = flat_weights(model)
        losses = steps(model, optimizer, comm, 12)
        assert model.bagua_ddp.bagua_train_step_counter == 12
        assert sum(len(bucket.params) for bucket in model.bagua_buckets) == 6
        model.bagua_ddp.close()
        return start, losses

    results = run_ranks(size, body)
    assert all(torch.equal(start, results[0][0]) for start, _ in results)
    assert sum(losses[-1] for _, losses in results) < 0.9 * sum(losses[0] for _, losses in results)


@pytest.mark.parametrize("hierarchical", [False, True])
def test_gradient_allreduce_has_the_numbers_of_one_process(hierarchical):
    def body(comm):
        model = seeded(mlp, seed=comm.rank if comm.rank else 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = gradient_allreduce.GradientAllReduceAlgorithm(hierarchical=hierarchical)
        bagua.with_bagua(model, [optimizer], algorithm, gs.Hierarchical(comm, [[0], [1, 2]]))
        steps(model, optimizer, comm, 10)
        model.bagua_ddp.close()
        return flat_weights(model)

    alone = train(None, wrap=False)
    for weights in run_ranks(3, body):
        assert relative_error(weights, alone) < 1e-5


def test_a_model_takes_memory_of_the_host_as_asked_and_one_level_otherwise():
    def body(comm):
        ways = []
        for group in (gs.HostMemory(comm), comm):
            model = seeded(mlp)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            bagua.with_bagua(model, [optimizer], gradient_allreduce.GradientAllReduceAlgorithm(), group)
            steps(model, optimizer, comm, 2)
            ways.append(model.bagua_ddp.report()["sums"])
            model.bagua_ddp.close()
        return ways

    ways = ["through host memory, as asked", "flat, as asked: 1 host x 2 ranks"]
    assert run_ranks(2, body) == [ways] * 2


def test_average_false_is_the_sum():
    def body(comm):
        model = seeded(mlp)
        algorithm = gradient_allreduce.GradientAllReduceAlgorithm(average=False)
        bagua.with_bagua(model, [], algorithm, process_group=comm)
        square(model(batches(1)[0])).backward()
        model.bagua_ddp.close()
        return flat_grads(model)

    model = seeded(mlp)
    square(model(batches(1)[0])).backward()
    for grads in run_ranks(2, body):
        torch.testing.assert_close(grads, 2 * flat_grads(model))


def test_bytegrad_is_exact_inside_a_host_and_codes_between_hosts():
    def body(comm, other):
        grads = []
        for own, hosts in ((comm, [[0, 1]]), (other, [[0], [1]])):
            model = seeded(mlp)
            group = gs.Hierarchical(own, hosts)
            bagua.with_bagua(model, [], bytegrad.ByteGradAlgorithm(), process_group=group)
            square(model(batches(1)[0])).backward()
            model.bagua_ddp.close()
            grads.append(flat_grads(model))
        return grads

    model = seeded(mlp)
    square(model(batches(1)[0])).backward()
    for exact, coded in run_ranks(2, body, groups=2):
        assert relative_error(exact, flat_grads(model)) < 1e-6
        assert 1e-4 < relative_error(coded, flat_grads(model)) < 0.1


def test_gradient_accumulation_by_hand():
    def body(comm):
        model = seeded(mlp)
        bagua.with_bagua(model, [], gradient_allreduce.GradientAllReduceAlgorithm(), process_group=comm)
        halves = batches(2, size=6)
        model.bagua_ddp.require_backward_grad_sync = False
        square(model(shard(halves[0], comm))).backward()
        own = flat_grads(model)
        model.bagua_ddp.require_backward_grad_sync = True
        square(model(shard(halves[1], comm))).backward()
        model.bagua_ddp.close()
        return own, flat_grads(model)

    first, second = run_ranks(2, body)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("name", ["decentralized", "low_precision_decentralized"])
def test_ranks_exchange_in_steps_1_3_and_5_with_an_interval_of_2(name):
    def body(comm):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = bagua.algorithms.Algorithm.init(name, communication_interval=2)
        bagua.with_bagua(model, [optimizer], algorithm, process_group=comm)
        sent = [model.bagua_ddp.engine.bytes_sent]
        for batch in batches(6):
            steps(model, optimizer, comm, data=[batch])
            sent.append(model.bagua_ddp.engine.bytes_sent)
        model.bagua_ddp.close()
        return [after - before > 100 for before, after in itertools.pairwise(sent)]  # agreements are 15 bytes

    for exchanged in run_ranks(2, body):
        assert exchanged == [True, False, True, False, True, False]


def test_async_is_aborted_and_resumed_through_the_model():
    def body(comm):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        algorithm = async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=1)
        bagua.with_bagua(model, [optimizer], algorithm, process_group=comm)
        steps(model, optimizer, comm, 4)
        model.bagua_algorithm.abort(model)
        before = flat_weights(model)
        model(batches(1)[0])
        assert torch.equal(before, flat_weights(model))
        model.bagua_algorithm.resume(model)
        steps(model, optimizer, comm, 4)
        with pytest.raises(gs.ConfigError, match="need the model whose algorithm this is"):
            model.bagua_algorithm.abort(mlp())
        model.bagua_ddp.close()

    run_ranks(2, body)


def test_async_rank_that_resumes_is_answered_by_one_that_has_ended():
    both_have_aborted = threading.Barrier(2)

    def body(comm):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        algorithm = async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=0)
        bagua.with_bagua(model, [optimizer], algorithm, process_group=comm)
        steps(model, optimizer, comm, 2)
        model.bagua_algorithm.abort(model)
        both_have_aborted.wait(30)
        time.sleep(0.2)  # rounds in which nobody trains
        if comm.rank == 1:
            model.bagua_algorithm.resume(model)
            steps(model, optimizer, comm, 4)
        model.bagua_ddp.close()

    run_ranks(2, body)


def test_registry():
    assert GlobalAlgorithmRegistry.get("bytegrad") is bytegrad.ByteGradAlgorithm
    with pytest.raises(KeyError, match="must be one of async, bytegrad.*got 'horovod'"):
        GlobalAlgorithmRegistry.get("horovod")
    with pytest.raises(ValueError, match="'async' is registered already"):
        GlobalAlgorithmRegistry.register("async", bytegrad.ByteGradAlgorithm)
    GlobalAlgorithmRegistry.register("mine", bytegrad.ByteGradAlgorithm, description="for this test")
    try:
        assert Algorithm.init("mine", average=False).average is False
    finally:
        del GlobalAlgorithmRegistry._algorithms["mine"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: decentralized.DecentralizedAlgorithm(peer_selection_mode="ring"),
            "'all' or 'shift_one', got 'ring'",
        ),
        (
            lambda: decentralized.DecentralizedAlgorithm(communication_interval=0),
            "must be a positive number of steps",
        ),
        (
            lambda: decentralized.LowPrecisionDecentralizedAlgorithm(communication_interval=0),
            "positive number",
        ),
        (
            lambda: async_model_average.AsyncModelAverageAlgorithm("shift_one"),
            "must be 'all', got 'shift_one'",
        ),
        (lambda: q_adam.QAdamAlgorithm(None), "must be a QAdamOptimizer, got None"),
        (lambda: bagua.with_bagua(mlp(), [], "bytegrad"), "algorithm must be an Algorithm .*got 'bytegrad'"),
        (lambda: bagua.with_bagua(3, [], bytegrad.ByteGradAlgorithm()), "must be a torch.nn.Module, got int"),
        (
            lambda: bagua.with_bagua(mlp(), [3], bytegrad.ByteGradAlgorithm()),
            "list of torch optimizers, got 3",
        ),
        (lambda: bagua.with_bagua(mlp(), [], bytegrad.ByteGradAlgorithm()), "not initialised"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(gs.ConfigError, match=message):
        make()


def test_qadam_wants_its_own_optimizer_and_decentralized_wants_one():
    def body(comm):
        model = mlp()
        optimizer = optimizer_of("qadam", model)
        with pytest.raises(gs.ConfigError, match="must be given the algorithm's own optimizer"):
            bagua.with_bagua(
                model, [optimizer_of("qadam", model)], q_adam.QAdamAlgorithm(optimizer), process_group=comm
            )
        with pytest.raises(gs.ConfigError, match="counts optimizer steps; give the optimizers"):
            bagua.with_bagua(model, [], decentralized.DecentralizedAlgorithm(), process_group=comm)

    run_ranks(1, body)
