"""gossamer.bagua: DistributedDataParallel, its communication hooks, and the all-reduce that autograd goes through."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
import gossamer.bagua
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api.algorithms import bytegrad, decentralized
from gossamer.bagua.torch_api.algorithms.base import AlgorithmImpl
from gossamer.bagua.torch_api.data_parallel import DistributedDataParallel, functional, wrapper
from tests.support.bagua_algorithms import MeanGradients, Of
from tests.support.jobs import Job
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


def test_it_trains_like_one_process():
    def body(comm):
        model = DistributedDataParallel(seeded(mlp, seed=comm.rank), process_group=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches(10):
            optimizer.zero_grad()
            square(model(shard(batch, comm))).backward()
            optimizer.step()
        assert next(iter(model.state_dict())) == "module.0.weight"
        assert model.inner is model.module.bagua_ddp
        assert len(model.bagua_buckets) == 1
        assert model.parameters_to_ignore == model.bagua_optimizers == []
        model.inner.close()
        return flat_weights(model)

    for weights in run_ranks(3, body):
        assert relative_error(weights, train(None, wrap=False)) < 1e-5


def test_no_sync_and_arguments():
    def body(comm):
        module = seeded(mlp)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = DistributedDataParallel(
            module,
            device_ids=[torch.device("cpu")],
            output_device="cpu",
            broadcast_buffers=False,
            process_group=comm,
            bucket_cap_mb=0.0005,
            find_unused_parameters=True,
            gradient_as_bucket_view=False,
            optimizers=[optimizer],
            algorithm=bytegrad.ByteGradAlgorithm(hierarchical=False),
        )
        assert len(model.bagua_buckets) > 1
        assert model.bagua_optimizers == [optimizer]
        assert (
            repr(model.bagua_algorithm.native)
            == "ByteGrad(average=True, codec=MinMaxUInt8(), deterministic=False)"
        )
        with model.no_sync():
            assert not model.require_backward_grad_sync
            square(model(shard(batches(1)[0], comm))).backward()
        own = flat_grads(model)
        assert model.require_backward_grad_sync
        square(model(shard(batches(1)[0], comm))).backward()
        model.inner.close()
        return own, flat_grads(model)

    first, second = run_ranks(2, body)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def mean_hook(comm, bucket):
    assert sum(grad.numel() for grad in bucket.gradients()) <= bucket.buffer().numel()
    assert [grad.shape for grad in bucket.gradients()] == [param.shape for param in bucket.parameters()]
    bucket.set_buffer(bucket.buffer() / 2)
    done = torch.futures.Future()
    done.set_result(
        [gs.all_reduce(bucket.buffer().clone(), group=comm)] if bucket.index() == 0 else bucket.buffer()
    )
    return done


def test_communication_hook_takes_the_place_of_the_algorithm():
    def body(comm, other):
        model = DistributedDataParallel(seeded(mlp), process_group=comm)
        model.register_comm_hook(other, mean_hook)
        square(model(shard(batches(1)[0], comm))).backward()
        with pytest.raises(gs.ConfigError, match="hook must be callable, got 3"):
            model.register_comm_hook(None, 3)
        model.inner.close()
        return flat_grads(model)

    alone = seeded(mlp)
    square(alone(batches(1)[0])).backward()
    for grads in run_ranks(2, body, groups=2):
        torch.testing.assert_close(grads, flat_grads(alone))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 1}, "dim must be 0 and check_reduction False, got 1 and False"),
        ({"check_reduction": True}, "check_reduction False, got 0 and True"),
        ({"device_ids": [0, 1]}, "device_ids must be None or the model's own device"),
        ({"output_device": 0}, "output_device must be None or the model's own device"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive, got 0"),
    ],
)
def test_arguments_that_cannot_be_met_are_refused(options, message):
    with pytest.raises(gs.ConfigError, match=message):
        DistributedDataParallel(mlp(), **options)


class OnTheSecondGpu(torch.nn.Module):
    """A model for the check of devices, which needs no such device."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda", 1))])


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    def check(device):
        return wrapper._check(OnTheSecondGpu(), [device], device, dim=0, check_reduction=False)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in ("cuda", torch.device("cuda"), "cuda:1", 1):
        check(device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in ("cuda", 0, "cpu"):
        with pytest.raises(gs.ConfigError, match="device_ids must be None or the model's own device"):
            check(device)


@pytest.mark.parametrize("divide", [True, False])
def test_uneven_inputs_train_as_with_data_parallel(divide):
    def body(comm, wrap):
        module = seeded(mlp)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model = wrap(module, optimizer, comm)
        for epoch in range(2):
            with model.join(divide):
                for batch in batches(1 + (comm.rank + epoch) % 2, seed=10 * epoch + comm.rank):
                    optimizer.zero_grad()
                    square(model(batch)).backward()
                    optimizer.step()
        return flat_weights(module)

    def ours(module, optimizer, comm):
        return gs.DataParallel(module, optimizer, process_group=comm)

    def baguas(module, optimizer, comm):
        return DistributedDataParallel(module, optimizers=[optimizer], process_group=comm)

    results = [*run_ranks(2, partial(body, wrap=ours)), *run_ranks(2, partial(body, wrap=baguas))]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert relative_error(results[2], results[0]) < 1e-6


def test_a_communication_hook_is_given_zeros_on_a_rank_without_batches():
    def body(comm, other):
        model = DistributedDataParallel(seeded(mlp), process_group=comm)
        model.register_comm_hook(other, mean_hook)
        with model.join():
            for batch in batches(comm.rank):
                square(model(batch)).backward()
        model.inner.close()
        return [param.grad for param in model.parameters()]

    alone = seeded(mlp)
    square(alone(batches(1)[0])).backward()
    without, with_batch = run_ranks(2, body, groups=2)
    assert without == [None] * 6
    torch.testing.assert_close(with_batch, [param.grad / 2 for param in alone.parameters()])


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (decentralized.DecentralizedAlgorithm(hierarchical=False), "needs every rank in every step"),
        (
            Of(MeanGradients),
            r"MeanGradients \(in Bagua's hooks.*needs every rank in every step.*drop_last=True",
        ),
    ],
    ids=["weights", "hooks"],
)
def test_uneven_inputs_are_refused_where_an_algorithm_may_need_every_rank(algorithm, message):
    def body(comm):
        module = seeded(mlp)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
        options = {"optimizers": optimizers, "process_group": comm, "algorithm": algorithm}
        model = DistributedDataParallel(module, **options)
        with pytest.raises(gs.ConfigError, match=message), model.join():
            pass
        with model.join(enable=False):
            square(model(batches(1)[0])).backward()
        model.inner.close()

    run_ranks(2, body)


@pytest.fixture(scope="module")
def two_ranks():
    with Job(2) as job, job.within(bagua.init_process_group, gs.shutdown):
        yield job


@pytest.mark.usefixtures("two_ranks")
def test_a_sum_of_torchs_functional_collectives_and_its_gradient():
    rank = bagua.get_rank()
    sums = partial(functional.all_reduce, op=bagua.ReduceOp.SUM, group=bagua.new_group())
    for reduce, expected in ((functional.all_reduce, 3.0), (sums, 3.0)):
        x = torch.full((2,), rank + 1.0, requires_grad=True)
        y = reduce(x)
        assert y.tolist() == [expected] * 2
        (y.sum() * (rank + 1)).backward()
        assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("two_ranks")
def test_the_gradient_of_a_maximum_goes_to_the_rank_that_holds_it_and_other_operations_are_refused():
    rank = bagua.get_rank()
    x = torch.tensor([1.0 + rank, 5.0 - rank], requires_grad=True)
    y = functional.all_reduce(x, dist.ReduceOp.MAX)
    assert y.tolist() == [2.0, 5.0]
    y.sum().backward()
    assert x.grad.tolist() == ([0.0, 2.0] if rank == 0 else [2.0, 0.0])
    for op in (dist.ReduceOp.MIN, bagua.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        with pytest.raises(gs.ConfigError, match="op must be SUM or MAX"):
            functional.all_reduce(x, op)


@pytest.mark.usefixtures("two_ranks")
def test_a_rank_outside_a_group_is_refused():
    group = bagua.new_group([1])
    if bagua.get_rank() == 1:
        bagua.with_bagua(mlp(), [], bytegrad.ByteGradAlgorithm(), process_group=group).bagua_ddp.close()
    else:
        with pytest.raises(gs.ConfigError, match=r"this rank is not in the group of ranks \[1\]"):
            bagua.with_bagua(mlp(), [], bytegrad.ByteGradAlgorithm(), process_group=group)
        with pytest.raises(gs.ConfigError, match=r"this rank is not in the group of ranks \[1\]"):
            functional.all_reduce(torch.ones(2), group=group)


@pytest.mark.usefixtures("two_ranks")
def test_groups_of_bagua_and_of_torch_give_the_same_gradients_and_collectives_by_hand_similar_ones():
    rank, size = bagua.get_rank(), bagua.get_world_size()
    grads = []
    for chosen in (None, bagua.new_group(), dist.group.WORLD):
        model = seeded(mlp, seed=rank)
        bagua.with_bagua(model, [], bytegrad.ByteGradAlgorithm(), process_group=chosen)
        grads.append(flat_grads_of(model, rank, size))
    assert all(torch.equal(grads[0], other) for other in grads)

    gossamer.bagua.patch()
    by_hand = flat_grads_of(seeded(mlp, seed=rank).with_bagua([], Of(SumsByHand)), rank, size)
    gossamer.bagua.unpatch()
    torch.testing.assert_close(by_hand, grads[0])


def flat_grads_of(model, rank, size):
    square(model(batches(1)[0][rank::size])).backward()
    model.bagua_ddp.close()
    return flat_grads(model)


class SumsByHand(AlgorithmImpl):
    """Sums gradients with Bagua's own collectives, on the communicators of its group."""

    def init_operations(self, bagua_ddp, bucket):
        every = self.process_group.get_global_communicator()

        def average(name):
            assert name == bucket.name
            for param in bucket.tensors:
                bagua.allreduce_inplace(param.bagua_getter_closure(), bagua.ReduceOp.AVG, comm=every)

        bucket.append_python_op(average, group=self.process_group)
