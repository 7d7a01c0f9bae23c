"""gossamer.bagua: tensors and buckets by themselves, and errors of their misuse. One process, or ranks as threads."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api import tensor as functions
from gossamer.bagua.torch_api.algorithms import decentralized
from gossamer.bagua.torch_api.bucket import BaguaBucket
from tests.support.bagua_algorithms import MeanGradients, MeanWeights, Of
from tests.support.models import batches, flat_weights, mlp, seeded, shard, square
from tests.support.ranks import run_ranks


def gradients_of(*params):
    for number, param in enumerate(params):
        functions.bagua_ensure_grad(param)
        functions.ensure_bagua_tensor(
            param,
            f"p{number}",
            "model",
            lambda each: each.grad,
            lambda each, grad: setattr(each, "grad", grad),
        )
    return list(params)


def test_proxy_and_effective_tensor():
    param = nn.Parameter(torch.arange(6.0).view(2, 3))
    assert not functions.is_bagua_tensor(param)
    gradients_of(param)
    assert functions.is_bagua_tensor(param)
    assert (functions.bagua_tensor_name(param), functions.bagua_module_name(param)) == ("p0", "model")
    assert functions.bagua_getter_closure(param) is param.grad
    functions.bagua_setter_closure(param, torch.ones(2, 3))
    assert param.grad.sum() == 6
    storage = torch.arange(10.0).untyped_storage()
    functions.bagua_set_storage(param, storage, 2)
    assert param.grad.tolist() == [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]
    plain = functions.ensure_bagua_tensor(torch.zeros(3))
    functions.bagua_set_storage(plain, storage, 1)
    assert plain.tolist() == [1.0, 2.0, 3.0]
    assert functions.bagua_tensor_name(plain).startswith("bagua_tensor_")


def test_registered_tensors_alone_are_instances_of_bagua_tensor():
    x = torch.ones(2)
    assert not isinstance(x, functions.BaguaTensor)
    assert isinstance(functions.ensure_bagua_tensor(x, "x"), functions.BaguaTensor)
    assert not isinstance(x.clone(), functions.BaguaTensor)
    assert not isinstance("x", functions.BaguaTensor)
    with pytest.raises(gs.ConfigError, match="made by ensure_bagua_tensor"):
        functions.BaguaTensor(x)


def test_view_is_registered_and_the_tensor_is_not():
    x = torch.zeros(4, requires_grad=True)
    view = functions.to_bagua_tensor(x, "x")
    assert functions.is_bagua_tensor(view)
    assert not functions.is_bagua_tensor(x)
    assert view.data_ptr() == x.data_ptr()


def test_copies_and_pickles_leave_the_registration_behind():
    (param,) = gradients_of(nn.Parameter(torch.ones(2)))
    for other in (copy.deepcopy(param), pickle.loads(pickle.dumps(param))):
        assert torch.equal(other, param)
        assert not functions.is_bagua_tensor(other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: functions.ensure_bagua_tensor(x, "y"), "is 'x' of model already, got 'y' of None"),
        (
            lambda x: functions.ensure_bagua_tensor(x, "x", "other"),
            "is 'x' of model already, got 'x' of other",
        ),
        (lambda x: functions.ensure_bagua_tensor(x, setter_closure=print), "needs a getter_closure"),
        (lambda x: functions.bagua_setter_closure(x, x), "'x' has no setter_closure"),
        (lambda x: functions.bagua_mark_communication_ready(x), "'x' is in no bucket of a model"),
        (lambda x: functions.bagua_tensor_name(torch.ones(1)), "this is no Bagua tensor"),
        (lambda x: BaguaBucket([x], "b", True, 0), "alignment must be a positive integer, got 0"),
        (lambda x: BaguaBucket([x, x], "b", True), r"different names, got \['x', 'x'\]"),
        (lambda x: BaguaBucket([], "b", True), r"one dtype, device and model, got 0 of \[\]"),
        (
            lambda x: BaguaBucket([x], "b", True).append_centralized_synchronous_op(),
            "append it in init_operations",
        ),
        (
            lambda x: BaguaBucket([x], "b", True).append_centralized_synchronous_op(compression="zip"),
            "compression must be 'MinMaxUInt8' or None, got 'zip'",
        ),
        (
            lambda x: BaguaBucket(
                [x, functions.ensure_bagua_tensor(x.double(), "z", "model")], "b", flatten=True
            ),
            "one dtype, device and model, got 2 of",
        ),
    ],
)
def test_misuse_is_refused(call, message):
    x = functions.ensure_bagua_tensor(torch.zeros(3), "x", "model")
    with pytest.raises(gs.ConfigError, match=message):
        call(x)


@pytest.mark.parametrize("sizes", [[(3, 2), (5,)], [(0,), (1,)], [(1,)], [(4, 4), (0,), (7,)]])
@pytest.mark.parametrize("alignment", [1, 4])
def test_bucket_keeps_values_lies_in_a_row_and_is_padded(sizes, alignment):
    params = gradients_of(*(nn.Parameter(torch.randn(size)) for size in sizes))
    for number, param in enumerate(params):
        param.grad.fill_(number + 1)
    before = [param.grad.clone() for param in params]
    bucket = BaguaBucket(params, "b", flatten=True, alignment=alignment)
    assert all(torch.equal(param.grad, old) for param, old in zip(params, before, strict=True))
    flat = bucket.flattened_tensor()
    count = sum(old.numel() for old in before)
    assert flat.numel() % alignment == 0
    assert flat.numel() - count < alignment
    assert torch.equal(flat[:count], torch.cat([old.flatten() for old in before]))
    assert (bucket.padding_tensor is None) == (flat.numel() == count)
    assert bucket.check_flatten()
    assert bucket.bytes() == 4 * count
    with bucket.values() as values:
        values[:count] += 1
    assert all(torch.equal(param.grad, old + 1) for param, old in zip(params, before, strict=True))
    params[0].grad = before[0].clone()
    assert bucket.check_flatten() == (before[0].numel() == 0 or (len(params) == 1 and flat.numel() == count))
    with bucket.values() as values:
        values[:count] *= 2
    assert torch.equal(params[0].grad, 2 * before[0])


def test_transposed_weights_keep_their_values():
    weight = functions.ensure_bagua_tensor(nn.Parameter(torch.arange(6.0).view(2, 3).t()), "w")
    bucket = BaguaBucket([weight], "b", flatten=True)
    assert weight.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert bucket.check_flatten()


def test_peer_weight_of_another_size_is_refused():
    class Wrong(MeanWeights):
        def init_operations(self, bagua_ddp, bucket):
            bucket.append_decentralized_synchronous_op(torch.zeros(3))

    def body(comm):
        bagua.with_bagua(mlp(), [], Of(Wrong), process_group=comm)

    with pytest.raises(gs.ConfigError, match="must be contiguous and have the bucket's 464 elements"):
        run_ranks(1, body)


@pytest.mark.parametrize(
    "algorithm", [Of(MeanGradients), decentralized.DecentralizedAlgorithm(communication_interval=9)]
)
def test_consensus_is_the_mean(algorithm):
    def body(comm):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, [optimizer], algorithm, process_group=comm)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(comm.rank)
        square(model(shard(batches(1)[0], comm))).backward()
        own = flat_weights(model)
        model.bagua_ddp.consensus()
        agreed = flat_weights(model)
        model.bagua_ddp.close()
        return own, agreed

    results = run_ranks(3, body)
    mean = sum(own for own, _ in results) / 3
    for _, agreed in results:
        assert torch.equal(agreed, results[0][1])
        torch.testing.assert_close(agreed, mean, rtol=1e-5, atol=1e-6)


def operation_of(comm, *, mode="all", flatten=True, dtype=torch.float32):
    tensor = functions.ensure_bagua_tensor(torch.zeros(3, dtype=dtype), "x", "model")
    bucket = BaguaBucket([tensor], "b", flatten)
    bucket.communicator_of = lambda group, hierarchical: comm
    return bucket.append_asynchronous_model_average_op(mode)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "shift_one"}, "peer_selection_mode must be 'all', got 'shift_one'"),
        (
            {"flatten": False},
            r"bucket 'b' \(1 tensors, 12 bytes\) must be made with flatten=True, got False",
        ),
        ({"dtype": torch.int64}, "must be of a floating-point dtype, got torch.int64"),
    ],
)
def test_what_cannot_be_averaged_in_place_is_refused(options, message):
    def body(comm):
        assert operation_of(comm).get_status()
        with pytest.raises(gs.ConfigError, match=f"append_asynchronous_model_average_op: .*{message}"):
            operation_of(comm, **options)

    run_ranks(1, body)


def test_operation_needs_a_bucket_of_a_model():
    tensor = functions.ensure_bagua_tensor(torch.zeros(3), "x", "model")
    with pytest.raises(gs.ConfigError, match="bucket 'b' is no model's yet; append it in init_operations"):
        BaguaBucket([tensor], "b", flatten=True).append_asynchronous_model_average_op("all")
