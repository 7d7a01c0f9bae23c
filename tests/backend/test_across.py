"""Calls of a group over several hosts, which hosts do not always compare before data moves.

Ranks of different hosts that make different calls all get one error, their tensors keep their values, and the group
goes on. A rank that dies or stops is named.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

import gossamer as gs
from gossamer import netlab
from tests.backend.jobs import TESTED, named_ranks, noise, options
from tests.support.on_hosts import partition_of, printed, run_ranks

unavailable = netlab.missing()
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(unavailable), reason=unavailable or "available"),
    pytest.mark.skipif(TESTED != "gossamer", reason="Gloo has no codecs"),
]


def all_reduce(numel: int, dtype: torch.dtype = torch.float32) -> None:
    x = torch.full((numel,), 3, dtype=dtype)
    try:
        dist.all_reduce(x)
    finally:
        assert x.eq(3).all()  # a call that is refused leaves it


def refused() -> None:
    dist.all_to_all_single(torch.ones(3), torch.ones(3), [7] * dist.get_world_size())


def differently_inside() -> None:
    """Ranks of one host make different calls. One that is alone makes a call that no other makes."""
    all_reduce(4321 + dist.get_rank())


def gather(numel: int, dtype: torch.dtype = torch.float32) -> None:
    outs = torch.zeros(numel * dist.get_world_size(), dtype=dtype)
    dist.all_gather_into_tensor(outs, torch.ones(numel, dtype=dtype))


def reduce_scatter(numel: int, dtype: torch.dtype = torch.float32) -> None:
    ins = torch.ones(numel * dist.get_world_size(), dtype=dtype)
    dist.reduce_scatter_tensor(torch.zeros(numel, dtype=dtype), ins)


# Floats of 4096 bytes are encoded in sums and gathers, all else is exact.
CALLS: dict[str, Callable[[], None]] = {
    "encoded all_reduce": lambda: all_reduce(5000),
    "encoded all_reduce of more": lambda: all_reduce(5001),
    "encoded reduce_scatter": lambda: reduce_scatter(5000),
    "encoded all_gather": lambda: gather(5000),
    "small all_reduce": lambda: all_reduce(5),
    "all_reduce of nothing": lambda: all_reduce(0),
    "all_reduce of integers": lambda: all_reduce(5000, torch.int64),
    "reduce_scatter of integers": lambda: reduce_scatter(7, torch.int64),
    "all_gather of integers": lambda: gather(7, torch.int64),
    "broadcast": lambda: dist.broadcast(torch.ones(5000), 0),
    "reduce": lambda: dist.reduce(torch.ones(5000), 0),
    "all_to_all": lambda: dist.all_to_all_single(*[torch.ones(2 * dist.get_world_size()) for _ in range(2)]),
    "barrier": dist.barrier,
    "refused": refused,
    "differently inside a host": differently_inside,
}
# But not two mistakes: then the first one is told.
PAIRS = list(combinations(CALLS, 2))[:-1]


def begin(ranks_of: list[int], timeout_s: float = 60) -> int:
    """Makes the default group. Returns this rank's host."""
    dist.init_process_group(
        TESTED,
        timeout=timedelta(seconds=timeout_s),
        pg_options=gs.Options(gs.Int8(), gather_codec=gs.Int8(), min_bytes=4096),
    )
    [host] = [host for host, ranks in enumerate(partition_of(ranks_of)) if dist.get_rank() in ranks]
    return host


def check_sum(key: int) -> float:
    """An encoded sum of noise: near the exact one. Returns its checksum."""
    size = dist.get_world_size()
    x = noise(key + dist.get_rank(), (20_011,), torch.float32)
    exact = sum(noise(key + rank, (20_011,), torch.float32).double() for rank in range(size))
    dist.all_reduce(x)
    assert (x - exact).norm() < 0.02 * exact.norm()
    return x.double().sum().item()


def differing_job(ranks_of: list[int], first: int, step: int) -> None:
    host = begin(ranks_of)
    sums, texts, seconds = [check_sum(0)], [], []
    for number, names in enumerate(PAIRS[first::step]):
        # The host that makes the first call changes.
        name = names[int(host != number % len(ranks_of))]
        begun = time.monotonic()
        with pytest.raises(gs.ConfigError) as caught:
            CALLS[name]()
        seconds.append(time.monotonic() - begun)
        texts.append(str(caught.value).rpartition("refused its call: ")[2])  # who refuses says only why
        sums.append(check_sum(number))
    print(json.dumps({"texts": texts, "sums": sums, "longest_s": max(seconds)}), flush=True)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks_of", "first", "step"),
    [([2, 2], 0, 1), ([3, 1], 0, 4), ([1, 1, 1], 2, 4)],
    ids=["2+2, all", "3+1, a quarter", "1+1+1, another quarter"],
)
def test_different_calls_are_one_error_on_all_ranks_and_the_group_goes_on(
    ranks_of: list[int], first: int, step: int
) -> None:
    job = f"from tests.backend import test_across; test_across.differing_job({ranks_of}, {first}, {step})"
    with netlab.Hosts(len(ranks_of)) as hosts:
        ends = run_ranks(hosts, ranks_of, job)
    for code, out, err in ends:
        assert code == 0, out[-2000:] + err[-4000:]
    found = [printed(end) for end in ends]
    for one in found:
        assert one["texts"] == found[0]["texts"]
        assert one["sums"] == found[0]["sums"]
        assert one["longest_s"] < 5
    for (_, other), text in zip(PAIRS[first::step], found[0]["texts"], strict=True):
        expected = "all_to_all" if other == "refused" else "every rank must make the same call"
        assert expected in text, f"{other}: {text}"


def losing_job(ranks_of: list[int], sign: int) -> None:
    """The last rank gets a signal during encoded calls; the others tell what they learn of it."""
    begin(ranks_of, timeout_s=4)
    check_sum(0)
    if dist.get_rank() == dist.get_world_size() - 1:
        if sign == signal.SIGSTOP and os.fork() == 0:  # lets it go on when all is over
            time.sleep(15)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), sign)
    begun = time.monotonic()
    try:
        while True:
            check_sum(1)
    except gs.CommError as error:
        print(json.dumps({"lost": str(error), "lost_s": time.monotonic() - begun}), flush=True)
    time.sleep(1)  # rank 0 hosts the store; others may still read the reason there
    os._exit(0)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("ranks_of", [[2, 2], [1, 1, 1]], ids=["2+2", "1+1+1"])
def test_a_rank_that_is_lost_in_an_encoded_call_is_named(ranks_of: list[int], sign: int) -> None:
    job = f"from tests.backend import test_across; test_across.losing_job({ranks_of}, {int(sign)})"
    with netlab.Hosts(len(ranks_of)) as hosts:
        ends = run_ranks(hosts, ranks_of, job)
    for end in ends[:-1]:
        one = printed(end)
        assert "lost" in one, end[1][-2000:] + end[2][-4000:]
        assert sum(ranks_of) - 1 in named_ranks(one["lost"]), one["lost"]
        assert one["lost_s"] < 12, one


def waiting_job() -> None:
    """The second rank comes later than the group's timeout, which the call of the first one does not have."""
    begin([1, 1], timeout_s=3)
    for numel in (5000, 5):  # encoded, exact
        dist.barrier()
        time.sleep(4 * dist.get_rank())
        x = torch.ones(numel)
        limit = options(AllreduceOptions, timeout=timedelta(seconds=30))
        dist.group.WORLD.allreduce([x], limit).wait()
        assert x.eq(2).all()
    print(json.dumps({"done": True}), flush=True)
    dist.destroy_process_group()


def test_the_timeout_of_a_call_may_be_longer_than_that_of_its_group() -> None:
    with netlab.Hosts(2) as hosts:
        ends = run_ranks(hosts, [1, 1], "from tests.backend import test_across; test_across.waiting_job()")
    for end in ends:
        assert printed(end) == {"done": True}, end[1][-2000:] + end[2][-4000:]
