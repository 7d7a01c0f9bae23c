# It sends plain messages and predicts nothing. `gossamer plan --measure` calls it inside a job, and users call
# gossamer.planner.measure(comm).
"""Measures links over the real communicator, codecs and memory on this machine, and a model's own step."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from gossamer._C import ByHosts
from gossamer.codec import CODECS, CodecSpeed
from gossamer.comm import Communicator
from gossamer.comm.c10d import hosts_of
from gossamer.planner.network import Network
from gossamer.planner.speeds import Speeds

_SMALL, _FIRST, _LARGEST = 8, 1 << 16, 1 << 26  # bytes of a message
_LONG_S = 0.15  # messages grow until one takes this long
_LEAST = 0.4  # the least share of a message's time that its half can take; a smaller figure is noise
_TURNS, _SMALL_TURNS = 3, 30
_LEAST_S = 1e-7  # the least latency
_CPU_BYTES = 1 << 20  # bytes of the messages whose processor time is measured
_CODEC_NUMEL = 1 << 20
_IN_MEMORY = 8  # this many times the codecs' elements fit in no cache
_STEPS, _CODEC_TURNS = 5, 15


@dataclass(frozen=True)
class Measured:
    """`network` and `speeds` of the slowest rank, as predict() takes them. `hosts`: the ranks of each host."""

    network: Network
    speeds: Speeds
    hosts: list[list[int]]


def measure(comm: Communicator, hosts: Sequence[Sequence[int]] | None = None) -> Measured:
    """Measures latency, bandwidth and codec speeds on all ranks at the same time. Collective; takes some seconds.

    The latency is the median time of many small messages, less a rank's own time for one. The bandwidth between hosts
    is that of a whole host whose ranks all send at once. A burst that a link lets through at first is not counted.

    Args:
        comm: what gossamer.comm.from_group returns. Nothing else may be under way in it.
        hosts: the ranks of each host. None: ranks that can share memory are one host.

    Raises:
        CommError: the group failed.
    """
    world: Communicator = comm.world if isinstance(comm, ByHosts) else comm
    lists = [list(host) for host in hosts] if hosts is not None else hosts_of(world)
    inside = _neighbours(world.rank, lists, across=False)
    across = _neighbours(world.rank, lists, across=True)
    network = Network(world.size, len(lists), payload=1.0)
    per_host = max(len(host) for host in lists)
    link: dict[str, float] = {}
    if per_host > 1:
        link["local_latency_s"], link["local_bandwidth"] = _link(world, inside)
    if len(lists) > 1:
        link["latency_s"], by_rank = _link(world, across)
        link["bandwidth"] = by_rank * min(len(host) for host in lists)
    farthest = across if len(lists) > 1 else inside
    link["message_s"] = _message_s(world, farthest)
    for name in link.keys() & {"latency_s", "local_latency_s"}:  # their time includes that of one message
        link[name] = max(_LEAST_S, link[name] - link["message_s"])
    measured = Network(**{**vars(network), **link})
    wire = _wire(world, farthest, _CPU_BYTES)
    return Measured(measured, replace(_speeds(world), wire=wire), lists)


def _neighbours(rank: int, hosts: list[list[int]], *, across: bool) -> tuple[int, int]:
    """Returns the ranks to which this rank sends and from which it receives: itself where there is no other."""
    own = next(number for number, host in enumerate(hosts) if rank in host)
    place = hosts[own].index(rank)
    ring = [host[place] for host in hosts if place < len(host)] if across else hosts[own]
    if across and place >= min(len(host) for host in hosts):
        return rank, rank
    at = ring.index(rank)
    return ring[(at + 1) % len(ring)], ring[at - 1]


def _link(comm: Communicator, neighbours: tuple[int, int]) -> tuple[float, float]:
    """Returns the seconds of a small message and the bytes per second of long ones, on the slowest rank."""
    latency_s = _exchange_s(comm, neighbours, _SMALL, _SMALL_TURNS)
    size, shorter_s = _FIRST, _exchange_s(comm, neighbours, _FIRST, _TURNS)
    while True:
        longer_s = _exchange_s(comm, neighbours, 2 * size, _TURNS)
        if longer_s >= _LONG_S or 2 * size >= _LARGEST:
            # The difference of the two leaves out the latency and a link's burst, which both have.
            return latency_s, size / max(longer_s - shorter_s, _LEAST * longer_s)
        size, shorter_s = 2 * size, longer_s


def _exchange_s(comm: Communicator, neighbours: tuple[int, int], nbytes: int, turns: int) -> float:
    exchange = _exchange(comm, neighbours, nbytes)
    exchange()
    return _median_s(comm, exchange, turns)


def _exchange(comm: Communicator, neighbours: tuple[int, int], nbytes: int) -> Callable[[], object]:
    out = torch.empty(nbytes, dtype=torch.uint8, device=comm.device)
    x = torch.zeros_like(out)
    return lambda: comm.exchange(out, x, *neighbours).wait()


def _message_s(comm: Communicator, neighbours: tuple[int, int]) -> float:
    """Returns a rank's seconds for each further message, by the best all-to-all of small rows."""
    if comm.size < 3:
        return Network.message_s
    x = torch.zeros(comm.size * _SMALL, dtype=torch.uint8, device=comm.device)
    out = torch.empty_like(x)

    def swap() -> None:
        comm.all_to_all(out, x).wait()

    swap()
    whole_s = _slowest(comm, min(_times(comm, swap, _SMALL_TURNS)))
    one_s = _slowest(comm, min(_times(comm, _exchange(comm, neighbours, _SMALL), _SMALL_TURNS)))
    return max(_LEAST_S, (whole_s - one_s) / (comm.size - 2))


def _speeds(comm: Communicator) -> Speeds:
    """Measures codecs, passes over memory and thin products: each rank's best turn, on the slowest rank."""
    device = comm.device
    x = torch.randn(1, _CODEC_NUMEL, device=device)
    out, total = torch.empty_like(x), torch.zeros(_CODEC_NUMEL, device=device)

    def rate(amount: float, call: Callable[[], object]) -> float:
        call()
        seconds = [_timed(comm, call) for _ in range(_CODEC_TURNS)]
        return amount / _slowest(comm, min(seconds))

    codecs = {}
    for kind in CODECS.values():
        codec = kind()
        wire = codec.encode(x)
        codecs[kind.__name__] = CodecSpeed(
            rate(x.nbytes, partial(codec.encode, x)),
            rate(x.nbytes, partial(codec.decode, wire, out)),
            rate(x.nbytes, partial(codec.decode_add, wire, total)),
        )
    matrix, thin = x.view(1024, -1), torch.randn(1024, 4, device=device)
    large = x.repeat(_IN_MEMORY, 1)
    larger = torch.empty_like(large)
    memory = rate(large.nbytes, lambda: torch.add(large, 1.0, out=larger))
    flops = rate(2 * matrix.numel() * thin.size(1), lambda: matrix @ thin)
    return Speeds(codecs, memory, flops, device=device.type)


def _wire(comm: Communicator, neighbours: tuple[int, int], nbytes: int) -> float:
    """Returns the bytes per second that a core sends and receives, by this process's processor time."""
    if comm.device.type != "cpu":
        return math.inf
    begin_s = time.process_time()
    for _ in range(_TURNS):
        _exchange(comm, neighbours, nbytes)()
    taken_s = _slowest(comm, time.process_time() - begin_s)
    return 2 * _TURNS * nbytes / max(taken_s, 1e-9)


def compute_of(
    comm: Communicator, module: nn.Module, inputs: Sequence[torch.Tensor], *, steps: int = _STEPS
) -> tuple[float, float]:
    """Returns the seconds of forward, backward and SGD while all ranks do the same, and the forward's share of them.

    The seconds are the slowest rank's median. Changes the module's gradients and weights. Collective.

    Args:
        inputs: the arguments of the module's forward. Its output is the loss if it is one number; else the loss is the
            mean of the output's squares.
        steps: how many steps are timed.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    forward_s = 0.0

    def step() -> None:
        nonlocal forward_s
        begin_s = time.perf_counter()
        output = module(*inputs)
        loss = output if output.numel() == 1 else output.float().square().mean()
        _synchronize(comm.device)
        forward_s = time.perf_counter() - begin_s
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    whole_s = _median_s(comm, step, steps)
    return whole_s, min(1.0, _slowest(comm, forward_s) / whole_s)


def _median_s(comm: Communicator, call: Callable[[], object], turns: int) -> float:
    """Returns the median on the slowest rank."""
    return _slowest(comm, statistics.median(_times(comm, call, turns)))


def _times(comm: Communicator, call: Callable[[], object], turns: int) -> list[float]:
    seconds = []
    for _ in range(turns):
        _slowest(comm, 0.0)  # all begin together
        seconds.append(_timed(comm, call))
    return seconds


def _timed(comm: Communicator, call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    _synchronize(comm.device)
    return time.perf_counter() - begin_s


def _slowest(comm: Communicator, seconds: float) -> float:
    """Returns the largest of the ranks' values, so that all ranks decide alike."""
    mine = torch.tensor([seconds], dtype=torch.float64, device=comm.device)
    every = mine.new_empty(comm.size)
    comm.all_gather(every, mine).wait()
    return float(every.max())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
