"""Steps that differ from forward, backward, step: accumulation, several models, checkpoints, re-planning.

Ranks are threads. What a single backward must give is in test_cases.py.
"""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import (
    ALGORITHMS,
    batches,
    flat_grads,
    flat_weights,
    gradients_alone,
    join,
    mlp,
    relative_error,
    seeded,
    shard,
    train,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("use_no_sync", [True, False])
def test_gradient_accumulation_equals_one_large_batch(use_no_sync, set_to_none):
    def body(comm):
        model = seeded(mlp)
        wrapped = gs.DataParallel(model, process_group=comm)
        seen = []
        for batch in batches(3):
            model.zero_grad(set_to_none=set_to_none)
            first, second = shard(batch, comm).chunk(2)
            if use_no_sync:
                with wrapped.no_sync():
                    (wrapped(first).square().mean() / 2).backward()
            else:
                (wrapped(first).square().mean() / 2).backward()
            (wrapped(second).square().mean() / 2).backward()
            seen.append(flat_grads(model))
        return seen

    reference = [join(step) for step in gradients_alone(mlp)]
    results = run_ranks(2, body)
    for mine in results:
        for step, expected in zip(mine, reference, strict=True):
            assert relative_error(step, expected) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))


def test_no_sync_sends_nothing_and_keeps_local_gradients():
    def body(comm):
        model = gs.DataParallel(seeded(mlp), process_group=comm)
        before = model.engine.bytes_sent
        with model.no_sync():
            model(shard(batches(1)[0], comm)).square().mean().backward()
        return flat_grads(model), model.engine.bytes_sent - before

    (first, sent), (second, _) = run_ranks(2, body)
    assert sent == 0
    assert not torch.equal(first, second)


def test_two_backwards_after_one_forward_add_their_means():
    def body(comm, wrap=True):
        model = seeded(mlp)
        wrapped = gs.DataParallel(model, process_group=comm) if wrap else model
        out = wrapped(shard(batches(1)[0], comm) if wrap else batches(1)[0])
        out.square().mean().backward(retain_graph=True)
        out.mean().backward()
        return flat_grads(model)

    reference = body(None, wrap=False)
    for mine in run_ranks(2, body):
        assert relative_error(mine, reference) < 1e-6


def test_two_models_train_at_once_without_mixing():
    def body(comm, other):
        generator, critic = seeded(mlp, 1), seeded(lambda: nn.Linear(5, 1), 2)
        a = gs.DataParallel(generator, process_group=comm)
        b = gs.DataParallel(critic, process_group=other, algorithm="bytegrad")
        for batch in batches(3):
            generator.zero_grad()
            critic.zero_grad()
            b(a(shard(batch, comm))).square().mean().backward()
        return torch.cat([flat_grads(generator), flat_grads(critic)])

    generator, critic = seeded(mlp, 1), seeded(lambda: nn.Linear(5, 1), 2)
    critic(generator(batches(3)[2])).square().mean().backward()
    reference = torch.cat([flat_grads(generator), flat_grads(critic)])
    for mine in run_ranks(2, body, groups=2):
        assert relative_error(mine, reference) < 0.02


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_the_bucket_after_every_backward(set_to_none):
    def body(comm):
        model = seeded(mlp)
        wrapped = gs.DataParallel(model, process_group=comm)
        for batch in batches(3):
            model.zero_grad(set_to_none=set_to_none)
            wrapped(shard(batch, comm)).sum().backward()
            for bucket in wrapped.engine.buckets:
                flat = bucket.flat()
                start, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
                assert start % 64 == 0
                for param, view in zip(bucket.params, bucket.views(), strict=True):
                    assert param.grad.data_ptr() == view.data_ptr()
                    assert start <= param.grad.data_ptr() < end
                    assert param.grad.data_ptr() % 64 == 0

    run_ranks(2, body)


def test_channels_last_gradients_keep_their_strides():
    build = lambda: nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # noqa: E731

    def body(comm):
        model = seeded(build)
        wrapped = gs.DataParallel(model, process_group=comm)
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))
        wrapped(shard(x, comm).to(memory_format=torch.channels_last)).square().mean().backward()
        return model.weight.grad

    model = seeded(build)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    model(x.to(memory_format=torch.channels_last)).square().mean().backward()
    for grad in run_ranks(2, body):
        assert grad.stride() == model.weight.grad.stride()
        torch.testing.assert_close(grad, model.weight.grad)


def test_evaluation_between_steps_changes_nothing():
    def body(comm, evaluate):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = gs.DataParallel(model, optimizer, process_group=comm)
        for batch in batches(4):
            if evaluate:
                wrapped.eval()
                wrapped(batch)
                with torch.no_grad():
                    wrapped.train()(batch)
            optimizer.zero_grad()
            wrapped(shard(batch, comm)).square().mean().backward()
            optimizer.step()
        return flat_weights(model)

    with_evaluation = run_ranks(2, lambda comm: body(comm, True))
    without = run_ranks(2, lambda comm: body(comm, False))
    assert torch.equal(with_evaluation[0], without[0])


def test_plan_follows_arrival_order_and_is_equal_on_all_ranks():
    class OutOfOrder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(10, 5), nn.Linear(10, 10)

        def forward(self, x):
            return self.last(self.first(x))

    def body(comm):
        model = seeded(OutOfOrder)
        wrapped = gs.DataParallel(model, process_group=comm, bucket_bytes=1, first_bucket_bytes=1)
        plans = [[bucket.param_indices for bucket in wrapped.engine.buckets]]
        for batch in batches(3):
            wrapped(shard(batch, comm)).sum().backward()
            plans.append([bucket.param_indices for bucket in wrapped.engine.buckets])
        return plans

    results = run_ranks(2, body)
    assert results[0] == results[1]
    assert results[0][0] == [[3], [2], [1], [0]]
    assert results[0][1] == results[0][2] == results[0][3]
    assert set(map(tuple, results[0][1][:2])) == {(0,), (1,)}


@pytest.mark.parametrize("algorithm", [gs.GradientAllReduce(deterministic=True), gs.ByteGrad()], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_do_not_depend_on_bucket_sizes(algorithm, size):
    def body(comm, bucket_bytes):
        return train(
            comm, algorithm=algorithm, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes, steps=20
        )

    small, large = (run_ranks(size, lambda comm, b=b: body(comm, b))[0] for b in (1, 1 << 20))
    assert torch.equal(small, large)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_training_equals_one_process_and_all_ranks_hold_equal_bits(algorithm):
    reference = train(None, wrap=False, steps=100)
    tolerance = 0.02 if algorithm == "bytegrad" else 1e-5
    for size in (1, 2, 3, 4):
        results = run_ranks(size, lambda comm: train(comm, algorithm=algorithm, steps=100))
        assert all(torch.equal(results[0], other) for other in results)
        assert relative_error(results[0], reference) < tolerance


def test_forwards_and_backwards_may_interleave_differently_on_each_rank():
    def body(comm):
        model = gs.DataParallel(seeded(mlp), process_group=comm, bucket_bytes=1, first_bucket_bytes=1)
        first, second = (shard(batch, comm) for batch in batches(2))
        if comm.rank == 0:
            losses = [model(first).square().mean(), model(second).square().mean()]
            for loss in losses:
                loss.backward()
        else:
            for x in (first, second):
                model(x).square().mean().backward()
        return flat_grads(model)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)
