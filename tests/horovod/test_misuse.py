# DistributedOptimizer, in the job of conftest.py: errors and warnings, on every rank, after which training goes
# on; and differences between ranks that are allowed.

import threading
import warnings

import pytest
import torch
from torch import nn

import gossamer as gs
import gossamer.horovod.torch as hvd
from tests.horovod.sets import mine, refused, still_works
from tests.horovod.training import close, loss_of, reference, sgd, train_over, ways, wrapped
from tests.support.models import mlp, seeded

pytestmark = pytest.mark.usefixtures("job")


def test_arguments_that_cannot_be():
    model = seeded(mlp)
    named = list(model.named_parameters())

    def made(*arguments, **options):
        return lambda: hvd.DistributedOptimizer(sgd(model), *arguments, **options)

    refused("(name, parameter) tuples", made([param for _, param in named]), ValueError)
    refused("unique, got twice: 0.bias", made([*named, ("0.bias", named[1][1])]), ValueError)
    refused("but 2 have no name (parameter group and place: 0.0, 0.1)", made(named[2:]), ValueError)
    refused(
        "needs op=Average, got 2.0 with op Sum",
        made(named, op=hvd.Sum, gradient_predivide_factor=2.0),
        ValueError,
    )
    refused("must be above 0, got 0", made(named, gradient_predivide_factor=0), ValueError)
    refused("op must be one of", made(named, op=9), ValueError)
    refused("whole number from 1, got 0", made(named, backward_passes_per_step=0), ValueError)
    refused("groups must be at least 0, got -1", made(named, groups=-1), ValueError)
    refused("must be a number or a list of lists", made(named, groups="two"), ValueError)
    refused("must hold parameters, got str", made(named, groups=[["0.bias"]]), ValueError)
    refused("once, got one of them several", made(named, groups=[[named[0][1]], [named[0][1]]]), ValueError)
    refused("registered ProcessSet", made(named, process_set=hvd.ProcessSet([0, 1])), ValueError)
    refused("codec must be a Codec", lambda: hvd.Compression.gossamer("int8"), ValueError)
    by_codec = hvd.Compression.gossamer(gs.Int8())
    refused("needs op Average or Sum", made(named, op=hvd.Min, compression=by_codec), ValueError)


def test_names_and_class():
    model = seeded(mlp)
    optimizer = hvd.DistributedOptimizer(sgd(model))
    assert sorted(optimizer._parameter_names.values()) == [f"allreduce.noname.0.{i}" for i in range(6)]
    named = wrapped(model, hvd.global_process_set)
    assert named._parameter_names == {param: name for name, param in model.named_parameters()}
    assert type(named).__name__ == "SGD"
    assert isinstance(named, torch.optim.SGD)
    assert type(named).__module__ == hvd.DistributedOptimizer.__module__
    assert named.report()["way"] == "undecided"
    refused("cannot be copied or pickled", lambda: __import__("copy").deepcopy(named), TypeError)


def test_a_gradient_too_many():
    for process_set, rank, size, way, compression in ways():
        model, optimizer = train_over(process_set, rank, steps=1, compression=compression)
        for _ in range(2):  # each way of the optimizer, in a step that goes on afterwards
            optimizer.zero_grad()
            loss_of(model, rank, 1).backward()
            with pytest.raises(AssertionError, match="backward_passes_per_step"):
                loss_of(model, rank, 1).backward()
            optimizer.synchronize()
        fresh = wrapped(seeded(mlp), process_set, compression=compression)
        first = next(iter(fresh._parameter_names))
        first.sum().backward()
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            first.sum().backward()
        fresh.synchronize()
        assert fresh.report()["way"] == way
        assert size > 1


def test_a_gradient_with_a_graph():
    for process_set, rank, _, way, compression in ways():
        model, optimizer = train_over(process_set, rank, steps=1, compression=compression)
        optimizer.zero_grad()
        if way == "negotiated":
            with pytest.raises(AssertionError, match="create_graph"):
                loss_of(model, rank, 1).backward(create_graph=True)
        else:
            loss_of(model, rank, 1).backward(create_graph=True)
            refused("create_graph=True", optimizer.synchronize)
        for param in model.parameters():
            param.grad = None
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        optimizer.step()


def test_synchronize_and_step_warn_and_skip_synchronize_does_not():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, compression=compression)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, 0).backward()
            optimizer.synchronize()
            before = [param.grad.norm() for param in model.parameters()]
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert all(
                param.grad.norm() < norm for param, norm in zip(model.parameters(), before, strict=True)
            )
            with warnings.catch_warnings(record=True) as seen, optimizer.skip_synchronize():
                warnings.simplefilter("always")
                optimizer.step()
            assert not seen, (way, size)
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(seen) == 1
        assert str(seen[0].message).startswith(
            "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize()"
        )


def test_state_is_kept_and_shared():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        plain = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        plain.step()
        state = plain.state_dict()
        optimizer = wrapped(model, process_set, plain, compression=compression)
        assert str(optimizer.state_dict()) == str(state)
        assert len(state["state"]) == 6
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        optimizer.load_state_dict(state)
        assert optimizer.param_groups is plain.param_groups
        assert optimizer.state is plain.state
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05, (way, size)


def test_what_was_begun_is_forgotten_where_a_state_is_loaded():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, compression=compression)
        start = {key: value.clone() for key, value in model.state_dict().items()}
        state = optimizer.state_dict()
        for turn in range(2):
            loss_of(model, rank, 7).backward()
            optimizer.load_state_dict(state)  # gradients were under way
            model.load_state_dict(start)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
            close(model, reference(size), (way, turn), exact=size == 2)
            state = {**state, "state": {}}


def test_ranks_that_ask_for_different_things():
    for process_set, rank, size in mine():
        if size == 1:
            continue
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, groups=3 if rank == size - 1 else None)
        loss_of(model, rank, 0).backward()
        last = process_set.ranks[-1]
        with pytest.raises(
            ValueError, match=rf"equal on all ranks, got .*groups \(\).* and .* on rank {last}"
        ):
            optimizer.step()
        wider = nn.Linear(3 if rank == 0 else 4, 2)
        optimizer = wrapped(wider, process_set, torch.optim.SGD(wider.parameters(), 0.1))
        with pytest.raises(ValueError, match=r"'parameter weight \[2, 3\] torch.float32 on cpu'"):
            optimizer.step()
    still_works()


def test_a_new_optimizer_takes_the_parameters_over():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        old = wrapped(model, process_set, torch.optim.SGD(model.parameters(), 0.0), compression=compression)
        loss_of(model, rank, 9).backward()
        old.step()
        new = wrapped(model, process_set, compression=compression)
        for step in range(3):
            new.zero_grad()
            loss_of(model, rank, step).backward()
            new.step()
        assert new.report()["way"] == way
        close(model, reference(size), (way, "taken over"), exact=size == 2)
        for _ in range(2):
            refused("made later has some of these parameters", old.step, ValueError)


def test_gradients_of_half_precision_with_a_scaler():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, compression=compression)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            overflow = float("inf") if step == 3 and rank == 0 else 1.0
            scaler.scale(loss_of(model, rank, step) * overflow).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0, (way, size)  # every rank has skipped the last step
        close(model, reference(size), (way, "scaled"), exact=False)


def test_another_thread_may_train():
    for process_set, rank, size, way, compression in ways():
        done = []

        def loop(process_set=process_set, rank=rank, compression=compression, done=done):
            done.append(train_over(process_set, rank, compression=compression)[0])

        thread = threading.Thread(target=loop)
        thread.start()
        thread.join(60)
        close(done[0], reference(size), (way, "thread"), exact=size == 2)
