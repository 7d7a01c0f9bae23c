"""Run by test_late.py on several ranks: after a failure the device is free, so that a rank can save what it has.

The device's backend fails as NCCL does: an operation whose peer is gone never ends by itself, and what the caller's
stream holds after it would wait for ever.
"""

import os
import sys
import time

import torch
from torch import nn

import gossamer as gs
from tests.support import late_device
from tests.support.models import Leave
from tests.support.ranks import say

native = late_device.wired()
LIMIT_S = 20


def failed(group):
    """Trains until the last rank is gone. Returns the error, and the seconds of this step until weights are copied."""
    torch.manual_seed(1)
    network = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to("late")
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    model = gs.DataParallel(network, optimizer, process_group=group, bucket_bytes=300, first_bucket_bytes=300)
    x = torch.ones(2, 8, device="late")
    for step in range(5):
        begin = time.monotonic()
        optimizer.zero_grad()
        last = step == 4 and gs.rank() == gs.size() - 1
        try:
            output = model(x)
            (Leave.apply(output) if last else output).square().sum().backward()
            optimizer.step()
        except gs.CommError as error:
            weights = {key: value.cpu() for key, value in network.state_dict().items()}
            assert len(weights) == 8
            torch.late.synchronize()
            return error, time.monotonic() - begin
    raise AssertionError("an error was expected")


def main(kind):
    native.set_late(late_device.LATENESS["all"])
    gs.init(backend="gloo")
    error, taken = failed(None if kind == "None" else getattr(gs, kind)())
    assert taken < LIMIT_S, (taken, error)
    say(f"free: {error}")
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
