"""Messages between two ranks at a time: all of a round at once, and both directions of a slow link at the same time."""

import sys

import pytest
import torch

from gossamer import netlab
from gossamer.errors import ConfigError
from gossamer.netlab import run_on_hosts
from tests.support.ranks import run_ranks

RATE_BITS, MESSAGE_BYTES = 40e6, 1_500_000

# Messages with one peer, and with both neighbours on a ring; with two ranks both neighbours are the same rank.
TIMED = f"""
import time
import torch
import torch.distributed as dist
import gossamer as gs
from gossamer import comm

gs.init("gloo")
group, other = comm.from_group(None), 1 - gs.rank()
x = torch.full(({MESSAGE_BYTES},), gs.rank(), dtype=torch.uint8)
for count in (1, 2):
    seconds = []
    for _ in range(3):
        outs = [torch.empty_like(x) for _ in range(count)]
        dist.barrier()
        begun = time.perf_counter()
        group.exchange_all([(out, x, other, other) for out in outs]).wait()
        seconds.append(time.perf_counter() - begun)
        assert all(bool((out == other).all()) for out in outs)
    print(min(seconds))
gs.shutdown()
"""

# Rank 1 lives on, and sends nothing.
FAILS = """
import time
import torch
import gossamer as gs
from gossamer import comm

gs.init("gossamer")
group = comm.from_group(None)
if gs.rank() == 0:
    begun = time.perf_counter()
    try:
        group.exchange(torch.empty(8), torch.ones(8), 1, 1).wait()
    except gs.CommError as error:
        print(time.perf_counter() - begun, error)
else:
    time.sleep(1)
    group.announce_failure("has given up, as planned")
    time.sleep(4)
"""


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_round_of_exchanges_brings_each_message_to_its_place(size, backend):
    def body(comm):
        outs = [torch.empty(3) for _ in range(size)]
        mine = [torch.full((3,), 10.0 * comm.rank + turn) for turn in range(size)]
        sent = comm.bytes_sent
        swaps = [
            (outs[turn], mine[turn], (comm.rank + turn) % size, (comm.rank - turn) % size)
            for turn in range(size)
        ]
        comm.exchange_all(swaps).wait()
        comm.exchange_all([]).wait()
        return [out.tolist() for out in outs], comm.bytes_sent - sent

    for rank, (outs, sent) in enumerate(run_ranks(size, body)):
        assert outs == [[10.0 * ((rank - turn) % size) + turn] * 3 for turn in range(size)]
        assert sent == 12 * (size - 1), "what a rank has for itself is not sent"


def test_a_message_that_cannot_be_sent_is_refused_before_any_is(backend):
    def body(comm):
        x = torch.zeros(4, 4)
        comm.exchange_all([(torch.empty(4), x[0], 1, 1), (x[:, 0], x[1], 1, 1)])

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, ConfigError)
        assert "exchange: tensors must be contiguous and on cpu, got strided on cpu" in str(error)


@pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing() or "available")
def test_a_rank_of_another_host_that_fails_ends_the_wait_for_its_message():
    waiting, _ = run_on_hosts([sys.executable, "-c", FAILS], 2, threads=1)
    seconds, _, error = waiting.stdout.partition(" ")
    assert "has given up, as planned" in error
    assert float(seconds) < 4, "before the rank ends and its connections break"


@pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing() or "available")
def test_both_directions_of_a_slow_link_are_used_at_the_same_time():
    outputs = run_on_hosts([sys.executable, "-c", TIMED], 2, rate="40mbit", threads=1)
    for output in outputs:
        for count, seconds in zip((1, 2), map(float, output.stdout.split()), strict=True):
            assert seconds < 1.5 * count * 8 * MESSAGE_BYTES / RATE_BITS, "in turns it would be twice"
