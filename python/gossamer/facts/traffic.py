"""What an algorithm sends and computes in a step, bucket by bucket. `Algorithm.traffic(messages)` returns it.

An algorithm asks a `Messages` for the price of each message. The planner implements `Messages` for one model on one
network (planner/messages.py), and computes how long the whole step takes (planner/schedule.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from gossamer.codec import Codec, CodecSpeed
from gossamer.topology import Topology


@dataclass(frozen=True)
class Cost:
    """The cost of messages.

    Args:
        seconds: how long they take.
        sent: bytes that a rank hands to other ranks, as its communicator counts them.
        across: bytes that leave a host.
    """

    seconds: float = 0.0
    sent: float = 0.0
    across: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.sent + other.sent, self.across + other.across)

    def times(self, count: float) -> "Cost":
        """Returns the cost of that many such messages."""
        return Cost(self.seconds * count, self.sent * count, self.across * count)


@dataclass(frozen=True)
class Job:
    """One task of the engine's worker: it computes for `cpu_s` seconds, and then sends.

    Args:
        cost: the cost of what it sends.
        cpu_s: seconds of computing before it sends.
        done: the share of the backward that must have ended before the task begins.
        beside_s: seconds of computing while the network is at work.
        inside: bytes that a rank hands to others of its host within `cpu_s` and `beside_s`, in addition to `cost`.
    """

    cost: Cost
    cpu_s: float = 0.0
    done: float = 0.0
    beside_s: float = 0.0
    inside: float = 0.0

    def __add__(self, other: "Job") -> "Job":
        """Returns one task that does this task's work and then the other's. It begins when this one would."""
        return Job(
            self.cost + other.cost,
            self.cpu_s + other.cpu_s,
            self.done,
            self.beside_s + other.beside_s,
            self.inside + other.inside,
        )

    def after(self, done: float) -> "Job":
        """Returns the same task, which begins when the share `done` of the backward has ended."""
        return replace(self, done=done)


@dataclass(frozen=True)
class Traffic:
    """The tasks of one step.

    Args:
        from_start: tasks that may begin with the forward. They end before the optimizer steps.
        in_backward: tasks that begin when their bucket is ready. They end before the optimizer steps.
        after: tasks during which the rank does nothing else. They happen once in `period` steps.
        portions: lists of tasks, each in the background for `delay` steps of a period. Training then waits for them.
        period: steps of a period.
        delay: steps that a portion may take.
        pause_s: seconds between two rounds of `after`, if they repeat in the background all the time; else None.
        lockstep: the ranks agree at the end of every backward.
    """

    from_start: Sequence[Job] = ()
    in_backward: Sequence[Job] = ()
    after: Sequence[Job] = ()
    portions: Sequence[Sequence[Job]] = ()
    period: int = 1
    delay: int = 0
    pause_s: float | None = None
    lockstep: bool = True


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of the engine's plan, without memory.

    Args:
        numel: elements, padding included.
        dtype: its gradients' dtype.
        positions: its parameters' positions among the model's.
        shapes: its parameters' shapes.
        done: the share of the backward after which its gradients are ready.
    """

    numel: int
    dtype: torch.dtype
    positions: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    done: float

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Messages(Protocol):
    """Prices the messages of one model on one network."""

    @property
    def buckets(self) -> Sequence[PlannedBucket]:
        """The engine's plan for the model."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    def parameter(self, bucket: PlannedBucket) -> tuple[str, torch.Tensor]:
        """The name of a bucket's first parameter, and a tensor of its shape."""

    def mean(self, bucket: PlannedBucket, codec: Codec | None, *, passes: int = 0) -> Job:
        """The mean of a bucket, and `passes` more passes over its memory. codec None: the exact all-reduce."""

    def means(self, codec: Codec | None = None) -> list[Job]:
        """The mean of every bucket's gradients, each when the gradients are ready."""

    def finite(self) -> list[Job]:
        """The ranks' agreement on finite gradients, for algorithms that send no gradients."""

    def sum(self, numel: int) -> Job:
        """The exact all-reduce of `numel` elements of float32."""

    def all_reduce(self, nbytes: int) -> Cost:
        """A ring over all ranks, of `nbytes` bytes."""

    def exchange(self, nbytes: int, topology: Topology) -> tuple[Cost, float]:
        """A message of `nbytes` to each peer in a topology, and the mean number of messages that a rank sends."""

    def speed_of(self, codec: Codec) -> CodecSpeed:
        """The speed of a codec on the machine."""

    def pass_s(self, nbytes: float) -> float:
        """Seconds of one pass over so many bytes of memory."""

    def product_s(self, operations: float) -> float:
        """Seconds of so many floating-point operations of products with thin matrices."""
