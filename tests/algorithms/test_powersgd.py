# PowerSGD's own invariants: memory formats and dtypes, for which its fast path has cases. Others are in
# tests/algorithms/test_contract.py, and references in test_oracles.py.

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import flat_weights, relative_error, seeded
from tests.support.ranks import run_ranks


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(512, 4)
    )


def weights_and_errors(comm, dtype, memory_format, *, infinite_at=None):
    """Weights, and PowerSGD's errors, after 6 steps. Steps with an infinite gradient are skipped."""
    module = seeded(convolutions).to(dtype=dtype, memory_format=memory_format)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)
    model = gs.DataParallel(module, optimizer, algorithm=gs.PowerSGD(2), process_group=comm)
    for step in range(6):
        seed = torch.Generator().manual_seed(100 * step + comm.rank)
        loss = model(torch.randn(4, 3, 8, 8, generator=seed).to(dtype)).square().mean()
        optimizer.zero_grad()
        (loss * (float("inf") if step == infinite_at and comm.rank == 1 else 1.0)).backward()
        if all(bool(param.grad.isfinite().all()) for param in module.parameters()):
            optimizer.step()
        else:
            assert step == infinite_at
    fields = model.algorithm_state_dict()["fields"]
    weights = flat_weights(module)
    model.close()
    return weights, fields


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_memory_format_of_parameters_does_not_change_what_is_learnt(dtype):
    def body(comm, other):
        contiguous, _ = weights_and_errors(comm, dtype, torch.contiguous_format)
        channels_last, _ = weights_and_errors(other, dtype, torch.channels_last)
        return contiguous, channels_last

    tolerance = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    results = run_ranks(2, body, groups=2)
    for contiguous, channels_last in results:
        assert torch.equal(channels_last, results[0][1])
        torch.testing.assert_close(channels_last, contiguous, **tolerance)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_an_infinite_gradient_reaches_all_ranks_and_leaves_nothing_behind(memory_format):
    def body(comm):
        return weights_and_errors(comm, torch.float32, memory_format, infinite_at=2)

    for weights, fields in run_ranks(2, body):
        assert torch.isfinite(weights).all()
        errors = [tensor for tensors in fields.values() for tensor in tensors.values()]
        assert errors
        assert all(bool(error.isfinite().all()) for error in errors)


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


def test_factors_of_before_a_backward_are_there_until_the_next_forward():
    def body(comm):
        algorithm = gs.PowerSGD(1, min_compression_rate=1.0)
        net = seeded(lambda: nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sizes = {"bucket_bytes": 400, "first_bucket_bytes": 400}
        model = gs.DataParallel(net, optimizer, algorithm=algorithm, process_group=comm, **sizes)

        def state(begun=()):
            return {name: right.clone() for name, right in algorithm.shared_state(begun)["right"].items()}

        seen = []
        for step in range(3):
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            before = state()
            loss.backward()
            seen.append((before, state(), state(range(9))))
        model.close()
        return seen

    for seen in run_ranks(2, body):
        for before, after, back in seen:
            assert len(before) == 2
            assert all(torch.equal(back[name], before[name]) for name in before)
            assert not any(torch.equal(after[name], before[name]) for name in before)
