"""gossamer.bagua: algorithms written in Bagua's hooks, as a user's own are. Ranks are threads."""

import gc
import time
import weakref

import pytest
import torch
from torch import nn

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api.algorithms.decentralized import LowPrecisionDecentralizedAlgorithm
from gossamer.bagua.torch_api.tensor import bagua_getter_closure, is_bagua_tensor
from gossamer.comm import split
from tests.support.bagua_algorithms import (
    Asynchronous,
    LowPrecision,
    MeanGradients,
    MeanWeights,
    Of,
    PaddedBytes,
    wait_for,
)
from tests.support.models import (
    batches,
    flat_grads,
    flat_weights,
    mlp,
    relative_error,
    seeded,
    shard,
    shards,
    square,
    train,
    trained,
)
from tests.support.ranks import run_ranks


class Awkward(nn.Module):
    """A parameter of the root module, one that is used sometimes, one that is never used; two dtypes."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(10))
        self.always, self.sometimes, self.never = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 3)
        self.wide = nn.Linear(10, 5).double()

    def forward(self, x, use=True):
        x = self.always(x + self.shift)
        return self.wide((self.sometimes(x) if use else x).double())


def train_with_bagua(comm, algorithm, count=10, *, module=None, group=None, flatten=True, set_to_none=True):
    model = module if module is not None else seeded(mlp, seed=comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.with_bagua(model, [optimizer], algorithm, group or comm, do_flatten=flatten)
    trained(model, optimizer, shards(count, comm), set_to_none=set_to_none)
    model.bagua_ddp.close()
    return flat_weights(model)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("bucket_bytes", [100, 10**6])
def test_mean_gradients_have_the_numbers_of_one_process(size, flatten, bucket_bytes, monkeypatch):
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(bucket_bytes))

    def body(comm):
        return train_with_bagua(comm, Of(MeanGradients), flatten=flatten, set_to_none=comm.rank == 0)

    alone = train(None, wrap=False)
    for weights in run_ranks(size, body):
        assert relative_error(weights, alone) < 1e-5


def test_compression_by_hosts_loses_little_and_keeps_padding_zero():
    def body(comm):
        group = gs.Hierarchical(comm, [[0], [1, 2]])
        model = seeded(mlp)
        bagua.with_bagua(model, [], Of(PaddedBytes), group)
        square(model(shard(batches(1)[0], comm))).backward()
        padding = [bucket.padding_tensor for bucket in model.bagua_buckets]
        assert sum(bucket.flattened_tensor().numel() % 8 for bucket in model.bagua_buckets) == 0
        model.bagua_ddp.close()
        return flat_grads(model), padding

    model = seeded(mlp)
    square(model(batches(1)[0])).backward()
    results = run_ranks(3, body)
    for grads, padding in results:
        assert torch.equal(grads, results[0][0])
        assert relative_error(grads, flat_grads(model)) < 0.1
        assert not any(zeros.any() for zeros in padding if zeros is not None)


def test_averaged_weights_follow_decentralized_averaging():
    def body(comm, other):
        ours = train_with_bagua(comm, Of(MeanWeights))
        theirs = train_with_bagua(other, bagua.algorithms.decentralized.DecentralizedAlgorithm())
        return ours, theirs

    for ours, theirs in run_ranks(3, body, groups=2):
        assert relative_error(ours, theirs) < 1e-5


def test_pairs_follow_shift_one():
    def body(comm, other):
        algorithm = bagua.algorithms.decentralized.DecentralizedAlgorithm(peer_selection_mode="shift_one")
        return train_with_bagua(comm, Of(MeanWeights, "shift_one")), train_with_bagua(other, algorithm)

    for ours, theirs in run_ranks(4, body, groups=2):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("size", [2, 3])
def test_compressed_differences_follow_low_precision_decentralized(size):
    def body(comm, other):
        return train_with_bagua(comm, Of(LowPrecision)), train_with_bagua(
            other, LowPrecisionDecentralizedAlgorithm()
        )

    for ours, theirs in run_ranks(size, body, groups=2):
        assert (
            relative_error(ours, theirs) < 1e-2
        )  # the order of parameters in a bucket differs, so its blocks too


def test_root_level_unused_and_double_parameters_are_averaged():
    def body(comm):
        model = seeded(Awkward)
        bagua.with_bagua(model, [], Of(MeanGradients), process_group=comm)
        for step in range(3):
            model.zero_grad()
            square(model(shard(batches(3)[step], comm), use=comm.rank == 0)).backward()
        model.bagua_ddp.close()
        return {name: param.grad for name, param in model.named_parameters()}

    first, second = run_ranks(2, body)
    for name in first:
        assert torch.equal(first[name], second[name])
        assert (first[name].abs().sum() > 0) == ("never" not in name)


def test_no_sync_accumulates():
    def body(comm):
        model = seeded(mlp)
        bagua.with_bagua(model, [], Of(MeanGradients), process_group=comm)
        model.bagua_ddp.require_backward_grad_sync = False
        square(model(shard(batches(1)[0], comm))).backward()
        own = flat_grads(model)
        model.bagua_ddp.require_backward_grad_sync = True
        square(model(shard(batches(1)[0], comm))).backward()
        model.bagua_ddp.close()
        return own, flat_grads(model)

    results = run_ranks(2, body)
    mean = sum(own for own, _ in results) / 2
    for own, grads in results:
        assert not torch.equal(own, mean)
        torch.testing.assert_close(grads, 2 * mean)


class Phases(MeanGradients):
    """Sums by a Python function for two steps, then by the operation."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.resets = self.forwards = 0

    def need_reset(self):
        return self.forwards == 2 and self.resets == 0

    def init_tensors(self, bagua_ddp):
        self.resets += self.forwards > 0
        self.by_name = {}
        return super().init_tensors(bagua_ddp)

    def init_forward_pre_hook(self, bagua_ddp):
        def hook(inputs):
            assert inputs[0].shape[1] == 10
            self.forwards += 1

        return hook

    def init_operations(self, bagua_ddp, bucket):
        self.by_name[bucket.name] = bucket
        if self.resets:
            return super().init_operations(bagua_ddp, bucket)
        return bucket.append_python_op(self.average, group=self.process_group)

    def average(self, name):
        for tensor in self.by_name[name].tensors:
            gs.all_reduce(bagua_getter_closure(tensor), op="mean", group=self.process_group)


def test_python_operations_and_reset():
    def body(comm):
        model = seeded(mlp)
        weights = train_with_bagua(comm, Of(Phases), module=model)
        assert model.bagua_algorithm.resets == 1
        assert not any(is_bagua_tensor(param) for param in model.parameters())
        return weights

    for weights in run_ranks(2, body):
        assert relative_error(weights, train(None, wrap=False)) < 1e-5


class Raises(MeanGradients):
    def init_operations(self, bagua_ddp, bucket):
        if self.process_group.rank == 1:
            bucket.append_python_op(self.fail)
        bucket.append_centralized_synchronous_op(group=self.process_group)

    def fail(self, name):
        raise OSError("disk full")


def test_error_of_an_operation_reaches_the_training_thread_and_the_other_ranks():
    errors = run_ranks(2, lambda comm: train_with_bagua(comm, Of(Raises)), errors=True)
    assert isinstance(errors[1], gs.GossamerError)
    assert "rank 1/2 step 0 bucket '0' (6 tensors" in str(errors[1])
    assert "disk full" in str(errors[1])
    assert isinstance(errors[0], gs.CommError)


class Forgets(MeanGradients):
    def init_backward_hook(self, bagua_ddp):
        usual = super().init_backward_hook(bagua_ddp)
        return lambda name, param: usual(name, param) if name != "2.bias" else None


def test_bucket_that_never_begins_is_an_error_of_backward():
    with pytest.raises(
        gs.ConfigError, match=r"end of the backward bucket '0'.*no hook has marked \['2.bias'\]"
    ):
        run_ranks(1, lambda comm: train_with_bagua(comm, Of(Forgets)))


def test_gradient_that_comes_twice_in_one_backward_is_an_error_and_the_other_rank_goes_on():
    """A hook would mark it twice, and the second mark would count for the next step."""

    def body(comm):
        model = seeded(Shared)
        bagua.with_bagua(model, [], Of(MeanGradients), process_group=comm)
        try:
            square(model(shard(batches(1)[0], comm), again=comm.rank == 1)).backward()
        finally:
            model.bagua_ddp.close()

    good, failed = run_ranks(2, body, errors=True)
    assert good is None
    assert isinstance(failed, gs.ConfigError)
    assert "parameter 'first.weight' got its gradient twice in one backward" in str(failed)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(10, 4), nn.Linear(4, 2)

    def forward(self, x, again=False):
        x = self.first(x)
        return self.last(Again.apply(x, self.first.weight) if again else x)


class Again(torch.autograd.Function):
    """Runs a backward of its own within the backward, as a reentrant checkpoint does."""

    @staticmethod
    def forward(ctx, x, param):
        ctx.param = param
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.param.square().sum().backward()
        return gradient, None


class Silent(torch.autograd.Function):
    """Brings no gradient to its second input."""

    @staticmethod
    def forward(ctx, x, param):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(10, 4), nn.Parameter(torch.ones(4))

    def forward(self, x, silent):
        x = self.first(x)
        return Silent.apply(x, self.last) if silent else x * self.last


def test_parameter_that_autograd_brings_no_gradient_for_counts_as_unused():
    def body(comm):
        model = seeded(Half)
        bagua.with_bagua(model, [], Of(MeanGradients), process_group=comm)
        for batch in batches(2):
            model.zero_grad()
            square(model(shard(batch, comm), silent=comm.rank == 1)).backward()
        model.bagua_ddp.close()
        return model.last.grad

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)
    assert first.any()


@pytest.mark.parametrize("close", [True, False])
def test_model_that_is_dropped_is_collected(close):
    def body(comm):
        model = seeded(mlp)
        bagua.with_bagua(model, [], Of(MeanGradients), process_group=comm)
        square(model(shard(batches(1)[0], comm))).backward()
        if close:
            model.bagua_ddp.close()
        left = [weakref.ref(each) for each in (model, model.bagua_ddp, model.bagua_algorithm)]
        del model
        return left

    alive = [ref for left in run_ranks(2, body) for ref in left]
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6


class RefusesToBegin(MeanGradients):
    def init_operations(self, bagua_ddp, bucket):
        raise LookupError("no operations")


def test_failed_wrap_leaves_the_model_free():
    def body(comm):
        model = seeded(mlp)
        with pytest.raises(LookupError, match="no operations"):
            bagua.with_bagua(model, [], Of(RefusesToBegin), process_group=comm)
        bagua.with_bagua(model, [], Of(MeanGradients), process_group=comm)
        square(model(shard(batches(1)[0], comm))).backward()
        model.bagua_ddp.close()
        return flat_grads(model)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


class AcrossAnotherGroup(MeanGradients):
    """Averages over hosts of another group than the model's."""

    def init_operations(self, bagua_ddp, bucket):
        bucket.append_centralized_synchronous_op(hierarchical=True, group=self.options["other"])


def test_hosts_of_the_models_group_are_not_those_of_another_group():
    def body(comm):
        pair, single = split(comm, [0, 1]), split(comm, [2])
        declared = Of(lambda group: AcrossAnotherGroup(group, other=pair or single))
        model = seeded(mlp)
        bagua.with_bagua(model, [], declared, gs.Hierarchical(comm, [[0], [1, 2]]))
        square(model(shard(batches(1)[0], comm))).backward()
        model.bagua_ddp.close()
        return flat_grads(model)

    first, second, alone = run_ranks(3, body)
    assert torch.equal(first, second)
    assert not torch.equal(first, alone)


def test_bytes_and_steps_are_in_the_report():
    def body(comm):
        model = seeded(mlp)
        bagua.with_bagua(model, [], Of(MeanGradients), process_group=comm)
        model.bagua_ddp.report(reset=True)
        for batch in batches(3):
            square(model(shard(batch, comm))).backward()
        report = dict(model.bagua_ddp.report())
        model.bagua_ddp.close()
        return report, 4 * sum(param.numel() for param in model.parameters())

    for report, gradient_bytes in run_ranks(2, body):
        assert report["steps"] == 2  # from the end of one backward to the end of the next
        assert report["bytes_out"] >= gradient_bytes


def test_state_is_the_algorithms_own_and_is_not_saved_here():
    def body(comm):
        model = seeded(mlp)
        bagua.with_bagua(model, [], Of(MeanGradients), process_group=comm)
        with pytest.raises(gs.ConfigError, match=r"MeanGradients \(in Bagua's hooks.*save it yourself"):
            model.bagua_ddp.algorithm_state_dict()
        model.bagua_ddp.close()

    run_ranks(1, body)


class RaisingSGD(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("of the optimizer")


@pytest.mark.parametrize("next_call", ["forward", "backward"])
def test_step_that_raises_holds_the_weights_no_longer_than_to_the_next_forward_or_backward(next_call):
    def body(comm):
        model = mlp()
        optimizer = RaisingSGD(model.parameters(), lr=1.0)
        bagua.with_bagua(model, [optimizer], Of(Asynchronous), process_group=comm)
        algorithm = model.bagua_algorithm
        batch = batches(1)[0]
        later = square(model(batch))
        square(model(batch)).backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        if next_call == "backward":
            later.backward()
        else:
            with torch.no_grad():
                model(batch)
        seen = algorithm.rounds
        wait_for(lambda: algorithm.rounds >= seen + 2)
        algorithm.abort(model)
        model.bagua_ddp.close()

    run_ranks(2, body)


def test_step_with_a_closure_holds_the_weights_while_that_runs_forwards_and_backwards():
    def body(comm):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        bagua.with_bagua(model, [optimizer], Of(Asynchronous), process_group=comm)
        algorithm = model.bagua_algorithm

        def closure():
            square(model(batches(1)[0])).backward()
            seen = algorithm.rounds
            time.sleep(0.05)
            assert algorithm.rounds <= seen + 1  # one may have been about to end
            return 0.0

        optimizer.step(closure)
        seen = algorithm.rounds
        wait_for(lambda: algorithm.rounds >= seen + 2)
        algorithm.abort(model)
        model.bagua_ddp.close()

    run_ranks(2, body)
