"""Ranks that differ, models that cannot be wrapped, steps that go wrong: an error on every rank, and no hang."""

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer.errors import GossamerError
from models import batches, flat_weights, mlp, seeded, shard, train
from ranks import run_ranks


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
    assert "bytegrad, gradient_allreduce" in str(error)


def test_double_wrapping_is_an_error_until_the_first_is_closed():
    def body(comm, other):
        model = seeded(mlp)
        first = gs.DataParallel(model, process_group=comm)
        with pytest.raises(gs.ConfigError, match=r"'0\.weight' belongs to a model that is wrapped already"):
            gs.DataParallel(model, process_group=other)
        with pytest.raises(gs.ConfigError, match=r"'module\.0\.weight' belongs to a model"):
            gs.DataParallel(first, process_group=other)
        first.close()
        first.close()
        again = gs.DataParallel(model, process_group=comm, algorithm="bytegrad")
        again(shard(batches(1)[0], comm)).sum().backward()
        again.close()

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


class SparseOnDemand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, index, sparse):
        return nn.functional.embedding(index, self.table, sparse=sparse) * self.scale


def test_a_sparse_gradient_on_one_rank_is_an_error_on_every_rank_and_training_goes_on():
    def body(comm):
        model = SparseOnDemand()
        wrapped = gs.DataParallel(model, process_group=comm)
        index = torch.tensor([0, 2])
        with pytest.raises(gs.ConfigError if comm.rank == 1 else gs.CommError) as caught:
            wrapped(index, sparse=comm.rank == 1).sum().backward()
        assert "rank 1: parameter 'table' has a sparse gradient" in str(caught.value)
        model.zero_grad()
        wrapped(index, sparse=False).sum().backward()
        return model.table.grad

    for grad in run_ranks(2, body):
        assert grad[0, 0] == 1
        assert grad[1, 0] == 0


def test_create_graph_is_an_error_on_every_rank():
    def body(comm):
        wrapped = gs.DataParallel(seeded(mlp), process_group=comm)
        wrapped(shard(batches(1)[0], comm)).square().sum().backward(create_graph=True)

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "create_graph=True" in str(error)


def test_a_dtype_changed_after_wrapping_is_an_error_that_names_the_parameter():
    def body(comm):
        model = seeded(mlp)
        wrapped = gs.DataParallel(model, process_group=comm)
        model.double()
        wrapped(batches(1)[0].double()).sum().backward()

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert (
            "'0.weight' was wrapped as Float on cpu and has been converted or moved since (it is Double on cpu"
            in str(error)
        )


class Failing(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x, fail=None):
        if fail == "forward":
            raise RuntimeError("forward failed on purpose")
        x = self.first(x)
        if fail == "backward":
            x = x * 1
            x.register_hook(_raise)
        return self.last(x)


def _raise(_grad):
    raise RuntimeError("backward failed on purpose")


@pytest.mark.parametrize("fail", ["forward", "backward"])
@pytest.mark.parametrize("who", ["all", "one"])
def test_training_goes_on_after_a_step_that_raised(fail, who):
    def body(comm):
        model = seeded(Failing)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = gs.DataParallel(
            model, optimizer, process_group=comm, bucket_bytes=100, first_bucket_bytes=100
        )
        errors = []
        for step, batch in enumerate(batches(6)):
            optimizer.zero_grad()
            failing = fail if step == 3 and (who == "all" or comm.rank == 1) else None
            try:
                wrapped(shard(batch, comm), failing).square().mean().backward()
            except (RuntimeError, GossamerError) as error:
                errors.append(str(error))
                if fail == "forward" and who == "one":
                    wrapped(shard(batch, comm)).square().mean().backward()  # the others are waiting in theirs
                else:
                    continue
            optimizer.step()
        return flat_weights(model), errors

    (first, errors_0), (second, errors_1) = run_ranks(2, body)
    assert torch.equal(first, second)
    assert any("on purpose" in error for error in errors_1)
    if who == "one" and fail == "backward":
        assert "rank 1: its backward raised before it ended" in errors_0[0]


def test_a_different_number_of_optimizer_steps_is_an_error_on_every_rank():
    def body(comm):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = gs.DataParallel(model, optimizer, process_group=comm)
        for step, batch in enumerate(batches(4)):
            wrapped(shard(batch, comm)).sum().backward()
            if comm.rank == 0 or step != 1:
                optimizer.step()

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.CommError)
        assert "different numbers of optimizer steps; rank 0: 2; rank 1: 1" in str(error)


def test_reentrant_checkpoint_that_shares_a_parameter_is_a_clear_error():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 10)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layer, self.layer(x), use_reentrant=True)

    def body(comm):
        gs.DataParallel(seeded(Shared), process_group=comm)(batches(1)[0]).sum().backward()

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "'layer.weight' got its gradient twice" in str(error) or "'layer.bias' got" in str(error)


def test_python_error_in_bucket_ready_surfaces_with_rank_step_and_bucket():
    class Broken(gs.Algorithm):
        def __repr__(self):
            return "Broken()"

        def bucket_ready(self, bucket):
            raise ValueError("no luck")

    def body(comm):
        train(comm, algorithm=Broken(), steps=1)

    for rank, error in enumerate(run_ranks(2, body, errors=True)):
        assert isinstance(error, GossamerError)
        assert f"rank {rank}/2 step 0 bucket 0 (grad, " in str(error)
        assert "no luck" in str(error)


def test_an_engine_that_failed_says_so_at_the_next_forward():
    class Broken(gs.Algorithm):
        def __repr__(self):
            return "Broken()"

        def bucket_ready(self, bucket):
            raise ValueError("no luck")

    def body(comm):
        model = gs.DataParallel(seeded(mlp), process_group=comm, algorithm=Broken())
        with pytest.raises(GossamerError):
            model(batches(1)[0]).sum().backward()
        with pytest.raises(gs.CommError, match="this engine stopped"):
            model(batches(1)[0])
        model.close()
        with pytest.raises(gs.ConfigError, match="closed"):
            model(batches(1)[0])

    run_ranks(1, body)
