"""What the algorithms share: their base class, which is the engine's, and checks of settings."""

from collections.abc import Callable, Container, Iterable

import torch
from torch import Tensor

from gossamer import _C
from gossamer.codec import Codec
from gossamer.comm import Communicator, Work
from gossamer.engine.algorithm import Algorithm
from gossamer.errors import ConfigError
from gossamer.facts import Job, Messages
from gossamer.topology import Mixing, Topology

__all__ = ["Algorithm", "average_with_peers", "job_with_peers", "require_codec", "require_in_optimizer"]
__all__ += ["Question", "require_steps", "swap_with_peers", "whole_chunks"]

#: Returns the numbers of each rank, in rank order. Collective.
Question = Callable[[Communicator], list[list[int]]]


def whole_chunks(comm: Communicator, block: int, codec: object = None) -> int:
    """Returns the alignment for a two-shot: whole blocks in every rank's chunk, and at least 8 elements, a wire row.

    A `codec` that gathers needs no chunk for each rank.
    """
    chunks = 1 if isinstance(codec, Codec) and codec.gathers else comm.chunks
    return chunks * max(block, 8)


def require_codec(where: str, codec: object) -> None:
    """Raises ConfigError unless `codec` is a Codec or None."""
    if codec is not None and not isinstance(codec, Codec):
        raise ConfigError(f"{where}: codec must be a Codec or None, got {codec!r}")


def require_steps(
    where: str, *, least: int = 1, what: str = "positive number of steps", **settings: int
) -> None:
    """Raises ConfigError unless each setting is an integer of at least `least`. The text calls that "a `what`"."""
    for name, value in settings.items():
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{where}: {name} must be a {what}, got {value!r}")


def require_in_optimizer(where: str, buckets: Iterable[_C.Bucket], known: Container[Tensor]) -> None:
    """Raises ConfigError unless all parameters of the buckets are among the optimizer's, which are `known`."""
    for bucket in buckets:
        for name, param in zip(bucket.names, bucket.params, strict=True):
            if param not in known:
                raise ConfigError(f"{where}: parameter '{name}' is not in the optimizer")


def swap_with_peers(comm: Communicator, mixing: Mixing, x: Tensor) -> tuple[list[Tensor], Work]:
    """Sends x to the peers of a round. Returns what each of mixing.exchanges brings, when the work is done."""
    received = [torch.empty_like(x) for _ in mixing.exchanges]
    pairs = zip(received, mixing.exchanges, strict=True)
    return received, comm.exchange_all([(own, x, exchange.to, exchange.source) for own, exchange in pairs])


def average_with_peers(topology: Topology, comm: Communicator, x: Tensor, out: Tensor, *, step: int) -> None:
    """Sets out [numel] to the weighted mean of x over this rank and its peers in round `step`. Collective."""
    if topology.uniform:
        torch.mul(x, 1.0 / comm.size, out=out)
        comm.all_reduce(out).wait()
        return
    mixing = topology.mixing(step, comm.size, comm.rank)
    received, sent = swap_with_peers(comm, mixing, x)
    torch.mul(x, mixing.own, out=out)
    sent.wait()
    for other, exchange in zip(received, mixing.exchanges, strict=True):
        out.add_(other, alpha=exchange.weight)


def job_with_peers(topology: Topology, nbytes: int, messages: Messages) -> Job:
    """Returns what average_with_peers costs for `nbytes`, for the planner."""
    pass_s = messages.pass_s(nbytes)
    if topology.uniform:
        return Job(messages.all_reduce(nbytes), 4 * pass_s)
    cost, sent = messages.exchange(nbytes, topology)
    return Job(cost, (4 + sent) * pass_s)
