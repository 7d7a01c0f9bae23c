"""The table of lives: a model that is wrapped, and wrapped again after its first wrapper has ended, in whatever way.

Each cell is right by a reference of one process, on all ranks, or it is one ConfigError on all ranks.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer as gs
import gossamer.horovod.torch as hvd
from tests.lives.faces import ALGORITHMS, FACES, KINDS, Wrapped, optimizer_of
from tests.lives.reference import (
    CELLS,
    FEW,
    LIVES,
    OnPurposeError,
    alone,
    begin,
    closed,
    cycle,
    dropped,
    dropped_on_rank_0,
    end,
    from_rank_0,
    inputs,
    lives,
    require_right,
    without_collector,
)
from tests.support.jobs import Job
from tests.support.models import flat_weights, mlp, seeded

pytestmark = pytest.mark.usefixtures("job")


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with Job(request.param) as job, job.within(begin, end):
        yield job


def train_twice(
    face: str,
    kind: str,
    life: Callable[..., Any],
    options: dict[str, Any],
    *,
    again: dict[str, Any] | None = None,
    second: str = "",
    face_again: str = "",
    part: bool = False,
) -> None:
    """Trains a model by two wrappers. `again`, `second` and `face_again` are the second one's, if they differ.

    Args:
        part: the first wrapper is of the model's first layer.
    """
    model, expected = seeded(mlp), seeded(mlp)
    with without_collector():
        kept = life(lambda: _first(face, model, kind, options, part=part))
        alone(expected, face, kind, 1, part=part)
        require_right(model, expected)
        from_rank_0(expected)
        wrapped = FACES[face_again or face](model, second or kind, **(again or {}))
        wrapped.train(inputs(2, gs.rank()))
        alone(expected, face_again or face, second or kind, 2)
        require_right(model, expected)
    del kept


def _first(face: str, model: nn.Sequential, kind: str, options: dict[str, Any], *, part: bool) -> Wrapped:
    if not part:
        return FACES[face](model, kind, **options)
    wrapped = FACES[face](model[0], kind, **options)
    forward = wrapped.forward
    wrapped.forward = lambda batch: model[1:](forward(batch))
    return wrapped


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize(("face", "kind"), CELLS)
def test_a_model_that_is_wrapped_again_trains_right(face, kind, life):
    train_twice(face, kind, life, {})


# --- a model whose memory is replaced ---


def new_memory_for_all(model: nn.Module) -> None:
    """To a user, "cpu:0" is the CPU. To torch it is another device, so weights and gradients are copied."""
    model.to("cpu:0")


def new_memory_for_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data = param.grad.data.clone()


@pytest.mark.parametrize("replace", [new_memory_for_all, new_memory_for_gradients])
@pytest.mark.parametrize(("face", "kind"), CELLS)
def test_a_model_whose_memory_is_replaced_between_steps(face, kind, replace):
    model, expected = seeded(mlp), seeded(mlp)
    wrapped = FACES[face](model, kind)
    for batch in inputs(1, gs.rank()):
        replace(model)
        wrapped.train(batch[None])
    alone(expected, face, kind, 1)
    require_right(model, expected)


# --- what is wrapped the second time ---

PAIRS = [
    (face, first, second)
    for face in FACES
    for first in KINDS[face]
    for second in KINDS[face]
    if first != second
]


@pytest.mark.parametrize("life", FEW)
@pytest.mark.parametrize(("face", "first", "second"), PAIRS)
def test_another_algorithm_with_another_optimizer(face, first, second, life):
    train_twice(face, first, life, {}, second=second)


@pytest.mark.parametrize("life", FEW)
@pytest.mark.parametrize("kind", KINDS["DataParallel"])
@pytest.mark.parametrize("face", ["DataParallel", "DistributedDataParallel"])
def test_the_same_algorithm_object(face, kind, life):
    algorithm = {"algorithm": ALGORITHMS[kind]()}
    train_twice(face, kind, life, algorithm, again=algorithm)


@pytest.mark.parametrize("life", FEW)
@pytest.mark.parametrize(("face", "kind"), [cell for cell in CELLS if "hvd" not in cell[0]])
def test_another_group_of_the_same_ranks(face, kind, life):
    group = dist.new_group(backend="gloo")
    train_twice(face, kind, life, {}, again={"group": group})
    dist.destroy_process_group(group)


@pytest.mark.parametrize("life", FEW)
@pytest.mark.parametrize("face", FACES)
def test_a_group_of_some_ranks(face, life):
    ranks = range(gs.size() - 1)
    group = hvd.add_process_set([*ranks]) if "hvd" in face else dist.new_group([*ranks])
    model, expected = seeded(mlp), seeded(mlp)
    with without_collector():
        kept = life(lambda: FACES[face](model, "gradients"))
        alone(expected, face, "gradients", 1)
        batch = inputs(2)[0].chunk(gs.size())
        if gs.rank() in ranks:
            FACES[face](model, "gradients", group=group).train(batch[gs.rank()][None])
            optimizer = optimizer_of(face, "gradients", expected.parameters())
            Wrapped(expected, optimizer, None, lambda: None).train(torch.cat(batch[:-1])[None])
        require_right(model, expected)
    del kept
    dist.barrier()
    hvd.remove_process_set(group) if "hvd" in face else dist.destroy_process_group(group)


@pytest.mark.parametrize("life", FEW)
@pytest.mark.parametrize("pair", [(a, b) for a in FACES for b in FACES if a != b], ids=" then ".join)
def test_another_face(pair, life):
    train_twice(pair[0], "gradients", life, {}, face_again=pair[1])


@pytest.mark.parametrize("life", FEW)
@pytest.mark.parametrize("face", FACES)
def test_another_face_after_an_optimizer_that_negotiates(face, life):
    train_twice("hvd.DistributedOptimizer", "negotiated", life, {}, face_again=face, second="gradients")


@pytest.mark.parametrize("life", FEW)
@pytest.mark.parametrize(("face", "kind"), CELLS)
def test_a_part_and_then_the_whole(face, kind, life):
    train_twice(face, kind, life, {}, part=True)


@pytest.mark.parametrize("life", [dropped, cycle, closed, lives, dropped_on_rank_0])
@pytest.mark.parametrize(("face", "kind"), [cell for cell in CELLS if cell[1] != "peers"])
def test_the_whole_and_then_a_part(face, kind, life):
    """A wrapper that lives on some rank keeps what the part lacks: an error on all ranks. Horovod's just ends.

    With Bagua the model holds what was made, which so lives as long as the model, or until it is closed.
    """
    model, expected = seeded(mlp), seeded(mlp)
    with without_collector():
        kept = life(lambda: FACES[face](model, kind))
        if "hvd" not in face and (
            life in (lives, dropped_on_rank_0) or ("bagua" in face and life is not closed)
        ):
            with pytest.raises(gs.ConfigError, match="belongs to a model that is wrapped already"):
                FACES[face](model[0], kind)
            return
        alone(expected, face, kind, 1)
        FACES[face](model[0], kind).train(inputs(2, gs.rank()), model[1:])
        alone(expected, face, kind, 2, part=True)
        require_right(model[0], expected[0])
    del kept


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("life", FEW)
@pytest.mark.parametrize(("face", "kind"), [cell for cell in CELLS if "bagua" not in cell[0]])
def test_a_copy_of_the_model(face, kind, life, when):
    """Made before the model is wrapped, or after it was trained. Bagua's model refuses to be copied."""
    model, expected = seeded(mlp), seeded(mlp)
    made = copy.deepcopy(model)
    with without_collector():
        kept = life(lambda: FACES[face](model, kind))
        if when == "after":
            made = copy.deepcopy(model)
            alone(expected, face, kind, 1)
            require_right(made, expected)
            from_rank_0(expected)
        trained = flat_weights(model)
        FACES[face](made, kind).train(inputs(2, gs.rank()))
        alone(expected, face, kind, 2)
        require_right(made, expected)
        assert torch.equal(flat_weights(model), trained)
    del kept


# --- ranks that come to the second wrapper in different ways ---


@pytest.mark.parametrize("face", ["DataParallel", "DistributedDataParallel"])
def test_a_rank_whose_backward_has_raised_wraps_again_while_the_others_wait_for_it(face):
    """They hear of it at once, with the old wrapper still there, and all train on by the new one."""
    model = seeded(mlp)
    first = FACES[face](model, "gradients")
    raises = gs.rank() == gs.size() - 1
    loss = first.forward(inputs(1, gs.rank())[0]).square().mean()
    if raises:
        model[0].weight.register_hook(raise_on_purpose)
    with pytest.raises(OnPurposeError if raises else gs.CommError):
        loss.backward()
    model[0].weight._backward_hooks = None
    again = FACES[face](model, "gradients")
    again.train(inputs(2, gs.rank()))
    weights = flat_weights(model)
    every = [torch.empty_like(weights) for _ in range(gs.size())]
    dist.all_gather(every, weights)
    assert all(torch.equal(each, weights) for each in every)
    del first


def raise_on_purpose(_grad: Tensor) -> None:
    raise OnPurposeError


@pytest.mark.parametrize("differ", [False, True], ids=["equal weights", "other weights"])
def test_a_loss_from_before_the_second_wrapper_is_alike_on_all_ranks(differ):
    """Wrapping writes no weights where they are equal; where it does, torch refuses the backward on every rank."""
    model = seeded(mlp)
    if differ:
        with torch.no_grad():
            model[0].weight.add_(gs.rank())
    first = gs.DataParallel(model, broadcast=False)
    loss = first(inputs(1, gs.rank())[0]).square().mean()
    second = gs.DataParallel(model)
    if differ:
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()
        expected = seeded(mlp)
        expected(inputs(1)[0]).square().mean().backward()
        torch.testing.assert_close(model[0].weight.grad, expected[0].weight.grad)
    model.zero_grad()
    second(inputs(1, gs.rank())[0]).square().mean().backward()  # goes on


def test_horovods_optimizer_made_of_itself():
    """A notebook cell that runs twice."""
    model, expected = seeded(mlp), seeded(mlp)
    optimizer = optimizer_of("hvd", "gradients", model.parameters())
    for _ in range(3):
        optimizer = hvd.DistributedOptimizer(optimizer)
    assert type(optimizer).__bases__[1] is torch.optim.SGD  # the chain does not grow
    Wrapped(model, optimizer, None, lambda: None).train(inputs(1, gs.rank()))
    alone(expected, "hvd", "gradients", 1)
    require_right(model, expected)
