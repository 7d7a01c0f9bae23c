"""Ranks that differ, models that cannot be wrapped, steps that go wrong: an error on every rank, and no hang."""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import batches, mlp, seeded, shard
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")


def wrap_different(builders, **options):
    return run_ranks(
        len(builders),
        lambda comm: gs.DataParallel(builders[comm.rank](), process_group=comm, **options),
        errors=True,
    )


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            lambda: nn.Linear(4, 3),
            lambda: nn.Linear(5, 3),
            "'parameter weight [3, 4] torch.float32 trainable' on rank 0 "
            "and 'parameter weight [3, 5] torch.float32 trainable' on rank 1",
        ),
        (
            lambda: nn.Linear(4, 3),
            lambda: nn.Linear(4, 3, dtype=torch.float64),
            "'parameter weight [3, 4] torch.float64 trainable' on rank 1",
        ),
        (
            lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}),
            lambda: nn.ModuleDict({"b": nn.Linear(2, 2), "a": nn.Linear(2, 2)}),
            "'parameter a.weight [2, 2] torch.float32 trainable' on rank 0 and 'parameter b.weight",
        ),
        (
            lambda: nn.Linear(4, 3),
            lambda: nn.Linear(4, 3, bias=False),
            "the first extra one is 'parameter bias [3] torch.float32 trainable' on rank 0",
        ),
        (
            lambda: nn.Linear(4, 3),
            lambda: nn.Linear(4, 3).requires_grad_(True) and _frozen_bias(),
            "'parameter bias [3] torch.float32 frozen' on rank 1",
        ),
    ],
    ids=["shape", "dtype", "order", "count", "frozen"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_models_that_differ_are_an_error_on_every_rank_naming_the_first_difference(
    first, second, message, size
):
    errors = wrap_different([first] + [second] * (size - 1))
    for error in errors:
        assert isinstance(error, gs.ConfigError)
        assert message in str(error)
    assert len({str(error) for error in errors}) == 1


def _frozen_bias():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    return model


def test_different_algorithms_or_bucket_sizes_are_an_error_on_every_rank():
    def by_algorithm(comm):
        gs.DataParallel(mlp(), process_group=comm, algorithm=["bytegrad", "gradient_allreduce"][comm.rank])

    def by_bucket(comm):
        gs.DataParallel(mlp(), process_group=comm, bucket_bytes=1000 + comm.rank)

    for body in (by_algorithm, by_bucket):
        for error in run_ranks(2, body, errors=True):
            assert isinstance(error, gs.ConfigError)
            assert "on rank 0 and" in str(error)


def test_unknown_algorithm_name_lists_the_known():
    def body(comm):
        gs.DataParallel(mlp(), process_group=comm, algorithm="horovod")

    (error,) = run_ranks(1, body, errors=True)
    assert isinstance(error, gs.ConfigError)
    assert "bytegrad, decentralized, gradient_allreduce" in str(error)


def test_the_wrapper_that_was_made_last_has_the_model():
    def body(comm, other):
        model = seeded(mlp)
        first = gs.DataParallel(model, process_group=comm)
        second = gs.DataParallel(model, process_group=other)
        with pytest.raises(gs.ConfigError, match="this wrapper has ended: its model was wrapped again"):
            first(batches(1)[0])
        second(shard(batches(1)[0], comm)).sum().backward()
        third = gs.DataParallel(model, process_group=comm)  # which served the first wrapper
        third(shard(batches(1)[0], comm)).sum().backward()

    run_ranks(2, body, groups=2)


def test_a_wrapper_that_lives_keeps_parameters_that_the_new_model_lacks():
    def body(comm, other):
        model = seeded(mlp)
        whole = gs.DataParallel(model, process_group=comm)
        with pytest.raises(gs.ConfigError, match="'weight' belongs to a model .* together with '"):
            gs.DataParallel(model[0], process_group=other)
        whole(shard(batches(1)[0], comm)).sum().backward()  # goes on
        whole.itself = [whole]
        del whole  # left to the collector, which may come at another time on each rank
        part = gs.DataParallel(model[0], process_group=other)
        part(shard(batches(1)[0], comm)).sum().backward()

    run_ranks(2, body, groups=2)


def test_a_model_that_holds_a_wrapper_is_refused():
    def body(comm, other):
        model = seeded(mlp)
        model[0] = gs.DataParallel(model[0], process_group=comm)
        with pytest.raises(gs.ConfigError, match=r"holds a wrapper already, '0' \(DataParallel\)"):
            gs.DataParallel(model, process_group=other)
        with pytest.raises(gs.ConfigError, match=r"holds a wrapper already, '' \(DataParallel\)"):
            gs.DataParallel(model[0], process_group=other)

    run_ranks(2, body, groups=2)


def test_one_communicator_serves_one_model():
    def body(comm):
        first = gs.DataParallel(mlp(), process_group=comm)
        with pytest.raises(gs.ConfigError, match="serves another model already"):
            gs.DataParallel(mlp(), process_group=comm)
        return first

    run_ranks(1, body)


class FakeDTensor(nn.Parameter):
    device_mesh = "mesh"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
        (lambda: nn.Embedding(5, 2, sparse=True), "makes sparse gradients"),
        (lambda: nn.LazyLinear(3), "is not initialised yet"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "got torch.complex64"),
        (lambda: nn.Linear(2, 2, device="meta"), "is on meta"),
        (lambda: nn.ParameterList([FakeDTensor(torch.ones(2))]), "is a DTensor"),
    ],
    ids=["frozen", "sparse", "lazy", "complex", "meta", "dtensor"],
)
def test_a_model_that_cannot_be_trained_this_way_is_refused_at_wrap(build, message):
    def body(comm):
        gs.DataParallel(build(), process_group=comm)

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert message in str(error)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(4, 3).requires_grad_(False),
        lambda: nn.Linear(4, 3, dtype=torch.complex64),
        lambda: nn.Linear(4, 3, device="meta"),
    ],
    ids=["frozen", "complex", "meta"],
)
def test_a_model_that_only_one_rank_refuses_is_an_error_on_every_rank(build):
    for error in wrap_different([lambda: nn.Linear(4, 3), build]):
        assert isinstance(error, gs.ConfigError)
        assert "entry 1 is 'accepted' on rank 0 and 'refused: engine: " in str(error)


def test_wrapping_works_under_a_default_device():
    def body(comm):
        model = seeded(mlp)
        with torch.device("meta"):
            gs.DataParallel(model, process_group=comm)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (mlp(), "bytegrad"),
            "optimizer must be a torch.optim.Optimizer, a list of them or None, got 'bytegrad'",
        ),
        ((mlp().parameters(),), "module must be a torch.nn.Module, got generator"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(arguments, message):
    with pytest.raises(gs.ConfigError) as caught:
        gs.DataParallel(*arguments)
    assert message in str(caught.value)
