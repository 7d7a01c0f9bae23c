"""Run by test_late.py on several ranks, on the simulated device: operations are launched in one order on all ranks.

The program does what races with a model's own operations: modules with a collective in forward and backward, as
SyncBatchNorm has, two wrapped models in one backward, and a group of its own. One rank's worker is slow.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import gossamer as gs
from gossamer import comm as comms
from gossamer.bagua.torch_api import with_bagua
from tests.lives.every import OURS, optimizer_of
from tests.support import late_device
from tests.support.bagua_algorithms import MeanGradients, Of
from tests.support.ranks import say

STEPS = 5
SIZES = {"bucket_bytes": 300, "first_bucket_bytes": 300}
native = late_device.wired()


class Mean(torch.autograd.Function):
    """The mean of all ranks' values, and of their gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return mean(x, group)

    @staticmethod
    def backward(ctx, grad):
        return mean(grad, ctx.group), None


def mean(x, group):
    x = x.clone()
    group.all_reduce(x).wait()
    return x / group.size


class Network(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = Mean.apply(layer(x).tanh(), self.group)
        return x


def by_wrapper(name, network):
    optimizer = optimizer_of("DataParallel", name, network.parameters())
    model = gs.DataParallel(network, optimizer, algorithm=OURS[name](), **SIZES)
    return model, optimizer, model.close


def by_bagua(network):
    optimizer = torch.optim.SGD(network.parameters(), 0.02)
    with_bagua(network, [optimizer], Of(MeanGradients), do_flatten=False, bucket_bytes=300)
    return network, optimizer, network.bagua_ddp.close


CASES = {
    name: partial(by_wrapper, name) for name in OURS if name != "async"
}  # whose rounds the program cannot foresee
CASES["with_bagua"] = by_bagua


def launches_of(wrap):
    """Trains two models, and returns the launches of this rank."""
    torch.manual_seed(1)
    own = comms.private(None, torch.device("late:0"))[0]
    models, optimizers, ends = zip(*(wrap(Network(own).to("late")) for _ in range(2)), strict=True)
    native.take_launches()
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.full((2, 8), 0.1 * (step + gs.rank()), device="late")
        loss = sum(model(x).square().sum() for model in models)
        loss.backward()
        mean(loss.detach(), own)
        for optimizer in optimizers:
            optimizer.step()
    for end in ends:
        end()
    native.synchronize()
    return native.take_launches()


def main():
    native.set_late(late_device.LATENESS["none"])
    gs.init()
    if gs.rank() == 1:
        native.set_worker_sleep(2)
    wrong = []
    for name, wrap in CASES.items():
        every = [None] * gs.size()
        dist.all_gather_object(every, launches_of(wrap))
        of_program = STEPS * (2 * 2 * 4 + 1)
        if len(every[0]) <= of_program or any(own != every[0] for own in every):
            wrong.append(name)
    assert not wrong, wrong
    say(f"alike: {len(CASES)}")


if __name__ == "__main__":
    main()
