"""The operations that a BaguaBucket runs on its values, made of Gossamer's collectives, topologies and algorithms.

An operation runs on the thread of the algorithm's Background, and blocks. The arithmetic of averaging, pairing and
codecs is elsewhere.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.algorithms.decentralized import average_with_peers
from gossamer.algorithms.low_precision_decentralized import exchange_differences
from gossamer.codec import Codec, MinMaxUInt8
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.errors import ConfigError
from gossamer.topology import Ring, ShiftOne, resolve

if TYPE_CHECKING:
    from gossamer.bagua.torch_api.bucket import BaguaBucket


def codec_of(what: str, compression: str | None) -> Codec | None:
    """The codec that Bagua calls by this name, or None for None. ConfigError for another name."""
    if compression not in (None, "MinMaxUInt8"):
        raise ConfigError(f"{what}: compression must be 'MinMaxUInt8' or None, got {compression!r}")
    return MinMaxUInt8() if compression is not None else None


def centralized(
    bucket: "BaguaBucket", comm: Communicator, *, average: bool, deterministic: bool, codec: Codec | None
) -> None:
    """Replaces the bucket's values by their mean or sum over the ranks, in place."""
    with bucket.values() as values:
        all_reduce(
            values,
            op="mean" if average else "sum",
            codec=codec,
            deterministic=deterministic and codec is None,
            group=comm,
        )
    if codec is not None and bucket.padding_tensor is not None:
        bucket.padding_tensor.zero_()


class Decentralized:
    """Averages the bucket's values with peers, into peer_weight. copy_back_peer_weight() copies that to the bucket."""

    def __init__(
        self, bucket: "BaguaBucket", comm: Communicator, peer_weight: Tensor, peer_selection_mode: str
    ) -> None:
        if peer_selection_mode not in ("all", "shift_one"):
            raise ConfigError(
                f"append_decentralized_synchronous_op: peer_selection_mode must be 'all' or 'shift_one', "
                f"got {peer_selection_mode!r}"
            )
        require_sizes("append_decentralized_synchronous_op", bucket, [peer_weight])
        self.peer_weight = peer_weight
        self._bucket, self._comm, self._round = bucket, comm, 0
        self._topology = ShiftOne() if peer_selection_mode == "shift_one" else resolve("all")

    def __call__(self) -> None:
        with self._bucket.values() as values:
            average_with_peers(
                self._topology, self._comm, values, self.peer_weight.view(-1), step=self._round
            )
        self._round += 1

    def copy_back_peer_weight(self, bucket: "BaguaBucket") -> None:
        """Copies peer_weight to the bucket's values. Call it in the training thread, after the operation."""
        with torch.no_grad(), bucket.values() as values:
            values.copy_(self.peer_weight.view(-1))


class LowPrecision:
    """One exchange of compressed differences of the bucket's values on a ring."""

    def __init__(
        self, bucket: "BaguaBucket", comm: Communicator, codec: Codec, replicas: Sequence[Tensor]
    ) -> None:
        require_sizes("append_low_precision_decentralized_synchronous_op", bucket, replicas)
        self._bucket, self._comm, self._codec = bucket, comm, codec
        self._own, self._left, self._right = (replica.view(-1) for replica in replicas)
        self._mixing = Ring().mixing(0, comm.size, comm.rank)

    def __call__(self) -> None:
        others = [self._left, self._right][: len(self._mixing.exchanges)]
        with self._bucket.values() as values:
            exchange_differences(self._comm, self._codec, self._mixing, values, self._own, others)
        if len(others) == 1:  # two ranks: both neighbours are the other one
            self._right.copy_(self._left)


def require_sizes(what: str, bucket: "BaguaBucket", tensors: Sequence[Tensor]) -> None:
    """ConfigError unless each tensor is contiguous and has the bucket's dtype and number of elements, with padding."""
    like = bucket.flattened_tensor()
    for tensor in tensors:
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype or not tensor.is_contiguous():
            raise ConfigError(
                f"{what}: tensors must be contiguous and have the bucket's {like.numel()} elements of {like.dtype}, "
                f"got {tensor.numel()} of {tensor.dtype}"
            )
