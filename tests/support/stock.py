"""torch's DistributedDataParallel beside ours in the same threads, and a model for both. Not a test file."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

import gossamer as gs
from tests.support.models import seeded, shards, square, trained
from tests.support.ranks import TIMEOUT_S, keep_alive, run_ranks


def run_beside(size, body, **options):
    """body(comm, group) on every rank: a communicator for ours, a torch process group of the same ranks for torch's."""
    store = dist.HashStore()

    def rank_body(comm):
        return body(comm, gloo_group(store, comm.rank, size))

    return run_ranks(size, rank_body, **options)


def gloo_group(store, rank, size):
    """A process group that torch's global list does not know, so that ranks can be threads.

    It lives as long as its test: objects that hooks leave on its own thread may hold the last reference to it.
    """
    store = dist.PrefixStore("stock", store)
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    keep_alive([group])
    return group


class Net(nn.Module):
    """Batch normalisation; tied, frozen, float64 and channels-last weights; a weight of the root module."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.first, self.norm = nn.Linear(10, 16), nn.BatchNorm1d(16)
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16)
        self.third.weight = self.second.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.wide = nn.Linear(16, 3).double()

    def forward(self, x):
        x = self.norm(self.first(x * self.scale)).tanh()
        x = self.conv(x.view(-1, 4, 2, 2)).flatten(1)
        return {"out": self.wide(self.frozen(self.third(self.second(x))).double())}


def loss_of(output):
    return square(output["out"] if isinstance(output, dict) else output)


def wrap(kind, inner, comm, group, options):
    if kind is Stock:
        return Stock(inner, process_group=group, **options)
    return gs.DistributedDataParallel(inner, process_group=comm, **options)


def both(body, *arguments, size=2):
    """[(torch's, ours)] of body(wrap, comm, *arguments) on every rank."""

    def of_rank(comm, group):
        def wrapper(kind):
            return lambda inner, **options: wrap(kind, inner, comm, group, options)

        return [body(wrapper(kind), comm, *arguments) for kind in (Stock, gs.DistributedDataParallel)]

    return run_beside(size, of_rank)


def state_after(wrap, comm, options, make=Net, steps=4, seed=None):
    inner = seeded(make, comm.rank if seed is None else seed)
    model = wrap(inner, **options)
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    trained(model, optimizer, shards(steps, comm), loss=loss_of)
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(states):
    first, second = states
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)
