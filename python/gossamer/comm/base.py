"""What a communicator is, for type checkers and readers; the native class is csrc/comm/communicator.h.

One group of ranks, no hidden default, no codec. Every call is collective: all ranks of the group make it in
the same order with equal shapes and dtypes.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gossamer import _C


class Work(Protocol):
    """One operation in flight."""

    def wait(self) -> None:
        """Returns when the result may be used: blocks the host on CPU, the current stream on NCCL.

        Raises:
            CommError: the operation failed; names the operation, its size and the ranks that do not answer.
        """


class Communicator(Protocol):
    """Moves contiguous tensors on `device` between the ranks of one group."""

    rank: int
    size: int
    device: torch.device
    chunks: (
        int  # the parts of a sum that a rank of its own computes each: size, or fewer where sums go by hosts
    )

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has handed to other ranks."""

    @property
    def bytes_received(self) -> int:
        """Payload bytes that other ranks have handed to this one."""

    def all_reduce(self, x: Tensor, op: _C.ReduceOp = ...) -> Work:
        """Sums x over the ranks, in place; or takes the MAX, MIN or PRODUCT."""

    def reduce_scatter(self, out: Tensor, x: Tensor, op: _C.ReduceOp = ...) -> Work:
        """out = this rank's part of the sum of x, which holds `size` parts; or of the MAX, MIN or PRODUCT."""

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """out = the x of rank 0, 1, ... one after the other."""

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Part j of x goes to rank j; part i of out comes from rank i."""

    def all_to_all_unequal(
        self, out: Tensor, x: Tensor, out_bytes: Sequence[int], x_bytes: Sequence[int]
    ) -> Work:
        """Of uint8: x_bytes[i] bytes of x go to rank i, in rank order; out_bytes[i] bytes of out come from it."""

    def broadcast(self, x: Tensor, source: int = 0) -> Work:
        """x = the x of rank `source`, in place."""

    def exchange(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        """Sends x to rank `to` and receives out from rank `source`."""

    def exchange_all(self, swaps: Sequence[tuple[Tensor, Tensor, int, int]]) -> Work:
        """Several exchanges of (out, x, to, source) at once: none waits for a message of another on the same link."""

    def allocate(self, nbytes: int) -> Tensor:
        """Zero-filled uint8 memory, 64-byte aligned, that this group's wire can reach. Collective."""

    def announce_failure(self, what: str = ...) -> None:
        """Lets the ranks that wait for this one know, as far as the group can, that they wait in vain.

        what: what this rank has done: the errors of the others say "rank 1 has <what>". A failure by default.
        """
