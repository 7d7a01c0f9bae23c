"""Run by test_late.py. What runs beside an engine has ended once the device has done it, on a device that is late."""

import threading
import time

import pytest
import torch

import gossamer as gs
from gossamer.engine import Background, background
from tests.support import late_device

LIMIT_S = 20


@pytest.fixture
def pair(monkeypatch):
    """A Background on the device, and the communicator of another rank."""
    monkeypatch.setattr(background, "duplicate", lambda comm: comm)
    with late_device.late("all"):
        first, second = late_device.wired_pair()
        own = Background(first)
        yield own, second
        own.close()


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def summed(comm, x):
    return lambda: comm.all_reduce(x).wait()


def test_a_task_has_ended_once_its_operation_has_ended_on_the_device(pair):
    own, other = pair
    x, y = (torch.full((4,), value, device="late") for value in (1.0, 2.0))
    numbers = [own.submit(summed(own.comm, each), "a sum") for each in (x, y)]
    assert own.busy()
    time.sleep(0.1)
    assert own.busy()

    summed(other, torch.ones(4))()
    own.wait(numbers[0])
    assert own.busy(), "the second sum's peer has not come"
    assert x.tolist() == [2.0] * 4

    summed(other, torch.ones(4))()
    until(lambda: not own.busy())
    assert y.tolist() == [3.0] * 4


def test_a_wait_for_an_operation_that_will_never_end_raises_and_frees_the_device(pair):
    own, other = pair
    x = torch.ones(4, device="late")
    own.submit(summed(own.comm, x), "a sum")
    threading.Timer(0.3, other.announce_failure, ["left the room"]).start()
    begin = time.monotonic()
    with pytest.raises(gs.CommError, match="rank 1 has left the room"):
        own.wait()
    assert time.monotonic() - begin < LIMIT_S / 2
    assert not own.busy()
    assert x.isnan().all(), "an aborted operation leaves anything"
