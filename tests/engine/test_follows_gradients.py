"""Algorithms that follow gradients: gradient_ready() and after_backward(). Ranks are threads."""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import batches, seeded, square
from tests.support.ranks import run_ranks


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left_out = nn.Linear(10, 3), nn.Linear(10, 3)

    def forward(self, x):
        return self.used(x)


class Notes(gs.Algorithm):
    """Notes what it is told."""

    fields = ()
    follows_gradients = True

    def __init__(self):
        self._told = []

    @property
    def lockstep(self):
        return False

    def gradient_ready(self, name, param):
        assert param.grad is not None
        self._told.append(name)

    def after_backward(self, missing):
        self._told.append([name for name, _ in missing])


def wrapped(comm, algorithm):
    return gs.DataParallel(seeded(Branches), algorithm=algorithm, process_group=comm)


def test_each_gradient_is_told_once_and_the_end_names_the_parameters_without_one():
    def body(comm):
        algorithm = Notes()
        model = wrapped(comm, algorithm)
        for _ in range(2):
            square(model(batches(1)[0])).backward()
        with model.no_sync():
            square(model(batches(1)[0])).backward()
        model.close()
        return algorithm._told

    for told in run_ranks(2, body):
        assert len(told) == 6
        assert sorted(told[:2]) == sorted(told[3:5]) == ["used.bias", "used.weight"]
        assert told[2] == told[5] == ["left_out.weight", "left_out.bias"]


def test_backward_that_raised_is_ended_by_the_next_forward():
    def body(comm):
        algorithm = Notes()
        model = wrapped(comm, algorithm)
        out = model(batches(1)[0])
        out.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            square(out).backward()
        model(batches(1)[0])
        model.close()
        return algorithm._told

    assert len(run_ranks(1, body)[0][-1]) >= 2


class Refuses(Notes):
    def gradient_ready(self, name, param):
        raise LookupError(f"no place for {name}")


def test_error_of_the_algorithm_comes_out_of_the_backward():
    def body(comm):
        model = wrapped(comm, Refuses())
        with pytest.raises(LookupError, match="no place for used"):
            square(model(batches(1)[0])).backward()
        model.close()

    run_ranks(1, body)


def test_gradients_stay_the_ranks_own():
    def body(comm):
        model = wrapped(comm, Notes())
        square(model(batches(1, seed=comm.rank)[0])).backward()
        model.close()
        return model.module.used.weight.grad

    first, second = run_ranks(2, body)
    assert not torch.equal(first, second)
