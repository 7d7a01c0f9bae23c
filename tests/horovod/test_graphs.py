# DistributedOptimizer, in the job of conftest.py: ranks whose backwards reach different parameters, bring
# sparse gradients, or end before the others'.

import gc

import pytest
import torch
from torch import nn

import gossamer.horovod.torch as hvd
from tests.horovod.sets import mine, refused
from tests.horovod.training import Own, batch, gradients_of, loss_of, ways, wrapped
from tests.support.models import mlp, seeded

pytestmark = pytest.mark.usefixtures("job")


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(10, 3), nn.Linear(10, 3), nn.Linear(10, 3)

    def forward(self, x, which):
        return getattr(self, which)(x)


def _branch(model, rank):
    return model(batch(rank, 0), "left" if rank == 0 else "right").square().mean()


def test_a_parameter_that_is_unused_on_a_rank_adds_zeros():
    for process_set, rank, size, way, compression in ways():
        model = seeded(_Branches)
        every = gradients_of(model, _branch, size)
        optimizer = wrapped(model, process_set, compression=compression)
        for _ in range(3):
            optimizer.zero_grad()
            _branch(model, rank).backward()
            optimizer.synchronize()
            for param, *grads in zip(model.parameters(), *every, strict=True):
                want = sum(grad for grad in grads if grad is not None) / size
                want = torch.zeros_like(param) if isinstance(want, float) else want
                assert torch.allclose(param.grad, want, atol=1e-6), (way, size)


def test_losses_may_have_a_backward_each_and_a_rank_may_have_none():
    for process_set, rank, size, way, compression in ways():
        model = seeded(_Branches)
        optimizer = wrapped(model, process_set, compression=compression)
        whole = [0, 1] if size == 2 else [0, 1, 2]  # the last of three or four has no backward at all
        for _ in range(3):
            every = gradients_of(
                model,
                lambda m, r: m(batch(r, 0), "left").square().mean() + m(batch(r, 1), "right").abs().mean(),
                len(whole),
            )
            optimizer.zero_grad()
            if rank in whole:
                for turn, which in enumerate(["left", "right"] if rank == 0 else ["right", "left"]):
                    del turn
                    out = model(batch(rank, 0 if which == "left" else 1), which)
                    (out.square() if which == "left" else out.abs()).mean().backward()
            optimizer.synchronize()
            for param, *grads in zip(model.parameters(), *every, strict=True):
                if grads[0] is not None:
                    assert torch.allclose(param.grad, sum(grads) / size, atol=1e-6), (way, size)
            with optimizer.skip_synchronize():
                optimizer.step()


def test_a_gradient_that_is_replaced_while_it_travels_is_the_reduced_one_afterwards():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, compression=compression)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            every = gradients_of(model, loss_of, size, step)
            if step:
                for param in model.parameters():
                    param.grad = param.grad.clone()
            optimizer.synchronize()
            for param, *grads in zip(model.parameters(), *every, strict=True):
                assert torch.allclose(param.grad, sum(grads) / size, atol=1e-6), (way, step)
            with optimizer.skip_synchronize():
                optimizer.step()


def test_a_parameter_that_is_trained_later_joins_in():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        frozen = list(model[0].parameters())
        optimizer = wrapped(model, process_set, compression=compression)
        for step in range(4):
            for param in frozen:
                param.requires_grad_(step != 1)
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, rank, step).backward()
            every = gradients_of(model, loss_of, size, step)
            optimizer.synchronize()
            for param, *grads in zip(model.parameters(), *every, strict=True):
                if grads[0] is None:
                    assert param.grad is None, (way, "a frozen parameter would be moved by weight decay")
                else:
                    assert torch.allclose(param.grad, sum(grads) / size, atol=1e-6), (way, step)
            with optimizer.skip_synchronize():
                optimizer.step()


def test_a_group_of_parameters_is_added():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        optimizer = wrapped(
            model,
            process_set,
            torch.optim.SGD(model[:3].parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
            compression=compression,
        )
        loss_of(model, rank, 0).backward()
        optimizer.step()
        optimizer.add_param_group({"params": list(model[4].parameters())})
        for step in (1, 2):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            every = gradients_of(model, loss_of, size, step)
            optimizer.synchronize()
            for param, *grads in zip(model.parameters(), *every, strict=True):
                assert torch.allclose(param.grad, sum(grads) / size, atol=1e-6), (way, step)
            with optimizer.skip_synchronize():
                optimizer.step()


def test_a_group_that_is_added_to_the_optimizer_that_ours_was_made_of_is_an_error():
    for process_set, rank, _, _, compression in ways():
        model = seeded(mlp)
        inner = torch.optim.SGD(model[:3].parameters(), lr=0.1)
        optimizer = wrapped(model, process_set, inner, compression=compression)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        inner.add_param_group({"params": list(model[4].parameters())})
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        with pytest.raises(ValueError, match=r"its groups have 6 parameters, and 4 when add_param_group"):
            optimizer.step()


def test_adasum_leaves_a_parameter_without_gradients_where_it_is():
    for process_set, rank, size in mine():
        if size == 1:
            continue
        model = seeded(_Branches)
        optimizer = wrapped(
            model,
            process_set,
            torch.optim.SGD(model.parameters(), 0.1),
            op=hvd.Adasum,
            backward_passes_per_step=2,
        )
        start = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(2):
            model(batch(0, 0), "left" if rank == 0 else "right").square().mean().backward()
        optimizer.step()
        moved = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
        assert moved == {"left.weight", "left.bias", "right.weight", "right.bias"}


def test_a_rank_that_is_out_of_data_joins():
    """On the global set, as join() is. Rank r has r batches more than rank 0."""
    for way, compression in {"engine": hvd.Compression.none, "negotiated": Own}.items():
        rank, size = hvd.rank(), hvd.size()
        for joined_before in (False, True):
            model = seeded(mlp)
            optimizer = wrapped(model, hvd.global_process_set, compression=compression)
            for step in range(rank + (0 if joined_before else 1)):
                start = seeded(mlp)
                start.load_state_dict(model.state_dict())
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                every = gradients_of(start, loss_of, size, step)
                optimizer.synchronize()
                here = [r for r in range(size) if r + (0 if joined_before else 1) > step]
                for param, *grads in zip(model.parameters(), *every, strict=True):
                    want = sum(grads[r] for r in here) / size
                    assert torch.allclose(param.grad, want, atol=1e-6), (way, joined_before, step)
                with optimizer.skip_synchronize():
                    optimizer.step()
            assert hvd.join() == size - 1 or size == 1
            hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
            hvd.broadcast_optimizer_state(optimizer, root_rank=size - 1)
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
            assert optimizer.report()["way"] == way
            every = hvd.allgather_object(
                optimizer.state_dict()["state"][0]["momentum_buffer"], name="momentum"
            )
            assert all(torch.equal(each, every[0]) for each in every)


def test_an_optimizer_that_was_dropped_has_no_part_in_a_join():
    """Even if only one rank's garbage collector has freed it."""
    gc.disable()
    try:
        model = seeded(mlp)
        optimizer = wrapped(model, hvd.global_process_set)
        loss_of(model, hvd.rank(), 0).backward()
        optimizer.step()
        assert optimizer.report()["way"] == "engine"
        optimizer.itself = optimizer
        del optimizer
        if hvd.rank() == 0:
            gc.collect()
        hvd.join()
    finally:
        gc.enable()


def test_a_sparse_gradient():
    for process_set, rank, size in mine():
        if size == 1:
            continue
        for as_dense in (False, True):

            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.bag, self.head = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)

                def forward(self, words):
                    return self.head(self.bag(words).sum(0) if words is not None else torch.ones(3))

            def loss(model, r, step=0):
                words = None if r == 1 else torch.tensor([r % 6, 2, 2, step])  # rank 1 looks nothing up
                return model(words).square().sum()

            model = seeded(Model)
            optimizer = wrapped(
                model, process_set, torch.optim.SGD(model.parameters(), 0.1), sparse_as_dense=as_dense
            )
            for step in range(3):
                every = gradients_of(model, loss, size, step)
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                optimizer.synchronize()
                for param, *grads in zip(model.parameters(), *every, strict=True):
                    want = sum(grad.to_dense() for grad in grads if grad is not None) / size
                    got = param.grad
                    assert got.is_sparse == (param is model.bag.weight and not (as_dense and rank == 1))
                    assert torch.allclose(got.to_dense() if got.is_sparse else got, want, atol=1e-6)
                with optimizer.skip_synchronize():
                    optimizer.step()
            assert optimizer.report()["way"] == "negotiated"


def test_a_sparse_gradient_that_comes_later():
    for process_set, rank, size in mine():
        if size == 1:
            continue
        model = nn.ModuleList([nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)])
        optimizer = wrapped(model, process_set, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            rows = model[0](torch.tensor([rank, 2])) if step == 1 and rank == 0 else torch.ones(2, 3)
            model[1](rows).sum().backward()
            if step == 1:
                refused("parameter '0.weight' has a sparse gradient", optimizer.step)
            else:
                optimizer.step()
