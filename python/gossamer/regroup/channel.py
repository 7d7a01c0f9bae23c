"""The connection by which one member of the group gives the state of the training to a newcomer, outside of the group.

Messages are trees of lists, dictionaries, numbers, texts and tensors. Both ends use it from one thread each.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer import config
from gossamer.comm import Communicator, connect_pair
from gossamer.engine import broadcast_state, broadcast_tensors
from gossamer.torch_private import tree_leaves, tree_map_only

_GIVER = 0
CONNECT_S = 5.0  # in which the other end must come, once both know of each other


class Kind(IntEnum):
    """What a message is."""

    STATE = 0  # all of it
    STEP = 1  # what has changed it since the message before
    WHOLE = 2  # nothing more: both ends are in one group, and the state is what it was sent as
    END = 3  # nothing more: the state cannot be brought up to date, and is worth nothing


@dataclass(frozen=True)
class Message:
    """A message.

    Attributes:
        left: messages that wait behind it.
        content: the tree; None with WHOLE and END.
    """

    kind: Kind
    left: int = 0
    content: Any = None

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(leaf.nbytes for leaf in tree_leaves(self.content) if isinstance(leaf, Tensor))


class Channel:
    """One end of a connection. Making it waits for the other end.

    Args:
        store: both ends meet in it.
        gives: whether this is the end that sends.

    Raises:
        RuntimeError: the other end is gone; also by send() and receive().
    """

    def __init__(self, store: dist.Store, *, gives: bool) -> None:
        rank, timeout_s = _GIVER if gives else 1, config.current().timeout_s
        self._comm: Communicator = connect_pair(
            store, rank, name="copy", connect_s=CONNECT_S, timeout_s=timeout_s
        )

    def send(self, message: Message) -> None:
        """Send a message, and return when the other end has begun to take it."""
        tensors = [leaf for leaf in tree_leaves(message.content) if isinstance(leaf, Tensor)]
        shapes = tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), message.content)
        head = [int(message.kind), message.left, shapes]
        broadcast_state(self._comm, lambda: head, _GIVER, take=False)
        broadcast_tensors(self._comm, tensors, _GIVER)

    def receive(self) -> Message:
        """Wait for a message. Its tensors are new ones."""
        kind, left, shapes = broadcast_state(self._comm, dict, _GIVER, take=True)
        content = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), shapes)
        tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
        broadcast_tensors(self._comm, tensors, _GIVER)
        return Message(Kind(kind), left, content)

    def end(self) -> None:
        """End the waits of both ends. Any thread may call it."""
        self._comm.announce_failure("ended the copy of its state")
