"""A training that is tuned, and what makes its steps slow on purpose. Not a test file."""

import itertools
import time

import torch
from torch import nn

import gossamer as gs
from gossamer.autotune import search
from tests.support.wrapped import step, wrap

KIB = 1 << 10


def deep():
    return nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.Tanh())))  # 390 KiB


class PerBucket(gs.Algorithm):
    """Takes as long for each bucket, whatever its size: so few large buckets are best."""

    name = "per_bucket"

    def bucket_ready(self, bucket):
        time.sleep(0.006)


class Slow(gs.Codec):
    """Another codec, and slow."""

    def __init__(self, codec=None):
        self.codec = codec if codec is not None else gs.Identity()
        self.block = self.codec.block

    def wire_bytes(self, numel, dtype=torch.float32):
        return self.codec.wire_bytes(numel, dtype)

    def encode(self, x):
        time.sleep(0.004)
        return self.codec.encode(x)

    def decode(self, wire, out):
        return self.codec.decode(wire, out)


def tune(comm, algorithm, *, build=deep, dtype=torch.float32, more=0, **options):
    """Trains until tuning is over, and `more` steps. Returns the wrapper, its optimizer and the number of steps."""
    options = {"autotune": True, "bucket_bytes": 64 * KIB, "first_bucket_bytes": 64 * KIB, **options}
    model, optimizer = wrap(comm, algorithm, build=build, lr=0.01, **options)
    for count in itertools.count(1):
        step(model, optimizer, batch_of(comm, count).to(dtype))
        assert count <= search.MAX_STEPS
        if model.tuned is not None:
            break
    for extra in range(more):
        step(model, optimizer, batch_of(comm, count + 1 + extra).to(dtype))
    return model, optimizer, count


def batch_of(comm, count, features=64):
    return torch.randn(4, features, generator=torch.Generator().manual_seed(100 * count + comm.rank))


def comm_of(comm):
    return gs.comm.duplicate(comm)
