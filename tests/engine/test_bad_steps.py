"""Steps that go wrong on one rank or all: an error on every rank, no hang, and training that may go on.

Ranks are threads. Models that differ or cannot be wrapped are in test_disagreement.py.
"""

import time

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer.errors import GossamerError
from tests.support.models import batches, flat_weights, mlp, seeded, shard, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")


def says_that_rank_1_failed(message: str) -> bool:
    return "rank 1 has failed: it gave up after an error of its own" in message


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


def resize(model: nn.Module) -> None:
    model[0].weight.data = torch.zeros(12, 20)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            nn.Module.double,
            " and has been converted, moved or resized since (it is 230 elements of Double on cpu now)",
        ),
        (lambda model: model.double().float(), ", and has been converted or moved, and back, since"),
        (resize, " and has been converted, moved or resized since (it is 240 elements of Float on cpu now)"),
    ],
    ids=["converted", "converted and back", "resized"],
)
def test_a_parameter_changed_after_wrapping_is_an_error_that_names_it(change, text):
    def body(comm):
        model = seeded(mlp)
        wrapped = gs.DataParallel(model, process_group=comm)
        change(model)
        wrapped(batches(1)[0].to(model[0].weight.dtype)).sum().backward()

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "'0.weight' was wrapped as 230 elements of Float on cpu" + text in str(error)


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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fail", ["forward", "backward"])
@pytest.mark.parametrize("who", ["all", "one"])
def test_training_goes_on_after_a_step_that_raised(fail, who, training):
    def body(comm):
        model = seeded(Failing)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = gs.DataParallel(
            model, optimizer, process_group=comm, bucket_bytes=100, first_bucket_bytes=100
        ).train(training)
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
        wrapped = gs.DataParallel(seeded(Shared), process_group=comm)
        wrapped(batches(1)[0]).sum().backward()

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "'layer.weight' got its gradient twice" in str(error) or "'layer.bias' got" in str(error)


class Broken(gs.Algorithm):
    """Fails on the given ranks; the others communicate."""

    def __init__(self, error, ranks):
        self._error, self._ranks = error, ranks

    def setup(self, comm, buckets):
        self._comm = comm

    def bucket_ready(self, bucket):
        if self._comm.rank in self._ranks:
            raise self._error
        self._comm.all_reduce(bucket.flat()).wait()


@pytest.mark.parametrize(
    ("error", "expected"), [(ValueError("no luck"), GossamerError), (gs.CodecError("no luck"), gs.CodecError)]
)
def test_python_error_in_bucket_ready_surfaces_with_rank_step_and_bucket(error, expected):
    def body(comm):
        train(comm, algorithm=Broken(error, [0, 1]), steps=1)

    for rank, caught in enumerate(run_ranks(2, body, errors=True)):
        assert type(caught) is expected
        assert f"rank {rank}/2 step 0 bucket 0 (grad, " in str(caught)
        assert "no luck" in str(caught)


def test_ranks_that_wait_for_a_failed_one_give_up_long_before_their_timeout():
    def body(comm):
        train(comm, algorithm=Broken(ValueError("no luck"), [1]), steps=1)

    begin = time.monotonic()
    waiting, failing = run_ranks(2, body, errors=True)
    assert time.monotonic() - begin < 25  # the group's timeout is 30 s
    assert isinstance(waiting, gs.CommError)
    assert says_that_rank_1_failed(str(waiting))
    assert "no luck" in str(failing)


def test_an_engine_that_failed_says_so_at_the_next_forward():
    def body(comm):
        model = gs.DataParallel(seeded(mlp), process_group=comm, algorithm=Broken(ValueError("no luck"), [0]))
        with pytest.raises(GossamerError):
            model(batches(1)[0]).sum().backward()
        with pytest.raises(gs.CommError, match="this engine stopped"):
            model(batches(1)[0])
        model.close()
        with pytest.raises(gs.ConfigError, match="closed"):
            model(batches(1)[0])

    run_ranks(1, body)


def test_a_second_backward_after_one_that_raised_is_an_error_on_every_rank():
    def body(comm):
        model = gs.DataParallel(seeded(Failing), process_group=comm)
        x = shard(batches(1)[0], comm)
        failing, good = model(x, fail="backward" if comm.rank == 1 else None), model(x)
        if comm.rank == 1:
            with pytest.raises(RuntimeError, match="on purpose"):
                failing.sum().backward()
        good.sum().backward()

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.CommError)
        assert "rank 1: its previous backward raised before it ended" in str(error)


def test_an_optimizer_that_steps_inside_backward_is_an_error_on_every_rank():
    def body(comm):
        model = seeded(mlp)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        wrapped = gs.DataParallel(model, process_group=comm)
        wrapped(shard(batches(1)[0], comm)).sum().backward()

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "lost its gradient to a hook before it was averaged" in str(error)


def test_closing_in_the_middle_of_a_backward_ends_it_and_the_others():
    def body(comm):
        model = gs.DataParallel(seeded(Failing), process_group=comm, bucket_bytes=100, first_bucket_bytes=100)
        x = shard(batches(1)[0], comm)
        if comm.rank == 0:
            return model(x).sum().backward()
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x, fail="backward").sum().backward()
        begin = time.monotonic()
        model.close()
        assert time.monotonic() - begin < 20
        return None

    waiting, closing = run_ranks(2, body, errors=True)
    assert closing is None
    assert isinstance(waiting, gs.CommError)
    assert "rank 1 has closed or deleted its model in the middle of a step" in str(waiting)
