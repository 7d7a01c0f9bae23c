# The functions that copy state between ranks, and SyncBatchNorm, in the job of conftest.py.

from functools import partial

import numpy
import pytest
import torch
from torch import nn

import gossamer.horovod.torch as hvd
from tests.horovod.sets import mine, refused, same, still_works
from tests.support.models import mlp, seeded

pytestmark = pytest.mark.usefixtures("job")


def test_parameters():
    for process_set, rank, _ in mine():
        root = process_set.ranks[-1]
        last = process_set.ranks.index(root)
        model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)), seed=rank)
        model.to(memory_format=torch.channels_last)
        model[1].num_batches_tracked += rank
        want = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)), seed=last)
        for params in (model.state_dict(), model.named_parameters(), list(model.parameters())):
            for param in model.parameters():
                param.data += 0 if rank == last else 1
            hvd.broadcast_parameters(params, root, process_set)
            for param, other in zip(model.parameters(), want.parameters(), strict=True):
                same(param, other, params)
        assert model[1].num_batches_tracked == last
    for wrong in (torch.ones(2), "weight", 3):
        refused("must be a state_dict", partial(hvd.broadcast_parameters, wrong, 0), ValueError)
    refused("'lr' must be a tensor", partial(hvd.broadcast_parameters, {"lr": 0.1}, 0), ValueError)


def _optimizers(params):
    yield torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
    yield torch.optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True, weight_decay=0.5, foreach=False)
    yield torch.optim.AdamW([{"params": params[:2], "lr": 0.5}, {"params": params[2:], "tag": "x"}], lr=0.1)
    yield torch.optim.Rprop(params)


def test_the_state_of_optimizers():
    for process_set, rank, size in mine():
        root = process_set.ranks[-1]
        for number in range(4):
            for steps in (0, 2):
                model = seeded(mlp, seed=rank)
                optimizer = list(_optimizers(list(model.parameters())))[number]
                optimizer = hvd.DistributedOptimizer(optimizer) if steps == 0 else optimizer
                if rank == size - 1:
                    for _ in range(steps):
                        model(torch.ones(2, 10)).sum().backward()
                        optimizer.step()
                    optimizer.param_groups[0]["lr"] = numpy.float32(0.25) if number else 0.25
                    optimizer.param_groups[0]["extra"] = (1, None, "text")
                else:
                    optimizer.param_groups[-1]["stale"] = 1
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                groups = optimizer.param_groups[0]
                hvd.broadcast_optimizer_state(optimizer, root, process_set=process_set)
                for name, value in model.state_dict().items():
                    same(value, weights[name], "a parameter moved")
                assert optimizer.param_groups[0] is groups
                own = optimizer.state_dict()
                every = hvd.allgather_object(own, name="state", process_set=process_set)
                assert all(str(each) == str(every[-1]) for each in every), (number, steps)
                assert len(own["state"]) == (6 if steps else 0)
                assert type(groups["lr"]) is (numpy.float32 if number else float)
                assert groups["extra"] == (1, None, "text")
                assert "stale" not in optimizer.param_groups[-1]
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                if steps:
                    optimizer.step()


def test_an_optimizer_that_has_not_stepped_has_zero_gradients_and_no_state():
    root = hvd.size() - 1
    for wraps in (False, True):
        model = seeded(mlp)
        params = list(model.parameters())
        params[0].requires_grad_(False)
        params[1].grad = torch.ones_like(params[1])
        optimizer = torch.optim.Adam(params, lr=0.1, weight_decay=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer) if wraps else optimizer
        weights = [param.detach().clone() for param in params]
        hvd.broadcast_optimizer_state(optimizer, root)
        assert params[0].grad is None
        for param, start in zip(params[1:], weights[1:], strict=True):
            same(param.grad, torch.zeros_like(param), "no zero gradient")
            same(param, start, "a parameter moved")
        assert not optimizer.state


def test_zero_gradients_of_sparse_embeddings_are_sparse():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), 0, model=model)
    assert model[0].weight.grad.is_sparse
    assert not model[1].weight.grad.is_sparse
    model(torch.tensor([1])).sum().backward()
    assert model[0].weight.grad.sparse_dim() == 1
    alone = nn.Embedding(5, 3, sparse=True)
    hvd.broadcast_optimizer_state(torch.optim.SparseAdam(alone.parameters()), 0)
    assert alone.weight.grad.is_sparse


def test_gradients_of_an_optimizer_that_has_stepped_stay():
    model = seeded(mlp)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    before = [param.grad.clone() for param in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    for param, gradient in zip(model.parameters(), before, strict=True):
        same(param.grad, gradient, "a gradient changed")


def test_optimizers_whose_state_cannot_be_copied():
    model = seeded(mlp)
    refused(
        "LBFGS",
        lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0),
        ValueError,
    )
    some = list(model.parameters())[: 4 if hvd.rank() == 0 else 6]
    optimizer = torch.optim.SGD(some, lr=0.1)
    refused("equal sizes, got [4]", lambda: hvd.broadcast_optimizer_state(optimizer, 0), ValueError)
    still_works()


def test_objects():
    for process_set, rank, size in mine():
        for root in process_set.ranks:
            mine_is = {"rank": hvd.rank(), "tensor": torch.arange(hvd.rank()), "text": "é" * 1000}
            got = hvd.broadcast_object(mine_is, root, process_set=process_set)
            assert (got is mine_is) == (root == hvd.rank())
            assert got["rank"] == root
            assert len(got["tensor"]) == root
        got = hvd.allgather_object([rank] * rank, process_set=process_set)
        assert got == [[each] * each for each in range(size)]
        assert hvd.broadcast_object(None, process_set.ranks[0], "nothing", process_set) is None
        generator = (each for each in "no pickle")
        bad = generator if rank == size - 1 else "fine"
        with pytest.raises(ValueError, match=f"rank {process_set.ranks[-1]}: a generator cannot be pickled"):
            hvd.broadcast_object(bad, process_set.ranks[-1], "object", process_set)
        with pytest.raises(ValueError, match=f"rank {process_set.ranks[-1]}: a generator cannot be pickled"):
            hvd.allgather_object(bad, "object", process_set)
    still_works()


def test_batchnorm_is_that_of_the_whole_batch():
    for process_set, rank, size in mine():
        for shape, stock in (
            ((3,), nn.BatchNorm1d),
            ((3, 4, 5), nn.BatchNorm2d),
            ((3, 2, 2, 2), nn.BatchNorm3d),
        ):
            for options in (
                {},
                {"affine": False, "momentum": None},
                {"track_running_stats": False, "eps": 0.1},
            ):
                ours = [hvd.SyncBatchNorm(3, **options, process_set=process_set) for _ in range(2)]
                whole = [stock(3, **options) for _ in range(2)]
                sizes = [2 + 3 * (each % 2) - 2 * (each == 2) for each in range(size)]
                start, own = sum(sizes[:rank]), sizes[rank]
                for _ in range(2):
                    everything = (
                        torch.randn(sum(sizes), *shape, generator=torch.Generator().manual_seed(1)) * 3 + 7
                    )
                    everything.requires_grad_()
                    part = everything.detach()[start : start + own].clone().requires_grad_()
                    want = whole[1](torch.tanh(whole[0](everything)))
                    got = ours[1](torch.tanh(ours[0](part)))
                    torch.testing.assert_close(got, want[start : start + own], rtol=1e-4, atol=1e-5)
                    want.square().sin().sum().backward()
                    got.square().sin().sum().backward()
                    torch.testing.assert_close(
                        part.grad, everything.grad[start : start + own], rtol=1e-3, atol=1e-5
                    )
                for one, other in zip(ours, whole, strict=True):
                    for name, value in other.state_dict().items():
                        torch.testing.assert_close(one.state_dict()[name], value, rtol=1e-4, atol=1e-5)
                    if one.affine:
                        one.weight.grad = hvd.allreduce(one.weight.grad, op=hvd.Sum, process_set=process_set)
                        torch.testing.assert_close(one.weight.grad, other.weight.grad, rtol=1e-3, atol=1e-3)
                    one.eval()
                    other.eval()
                    torch.testing.assert_close(one(part), other(part), rtol=1e-4, atol=1e-5)


def test_batchnorm_of_too_few_values_and_wrong_shapes():
    for process_set, rank, _ in mine():
        layer = hvd.SyncBatchNorm(3, process_set=process_set)
        refused("input must be [N, 3, ...]", partial(layer, torch.ones(2, 4)), ValueError)
        few = torch.ones(1 if rank == 0 else 0, 3)
        with pytest.raises(ValueError, match=r"needs two values for a channel over all ranks, got 1"):
            layer(few)
    still_works()


def test_batchnorm_goes_on_while_a_rank_has_joined():
    layer = hvd.SyncBatchNorm(3)
    part = torch.arange(12.0).view(4, 3) * (hvd.rank() + 1)
    if hvd.rank() != 0:
        others = torch.cat([torch.arange(12.0).view(4, 3) * (rank + 1) for rank in range(1, hvd.size())])
        want = nn.BatchNorm1d(3)(others)[4 * (hvd.rank() - 1) :][:4]
        torch.testing.assert_close(layer(part), want, rtol=1e-4, atol=1e-5)
    hvd.join()
