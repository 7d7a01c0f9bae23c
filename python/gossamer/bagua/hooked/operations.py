"""The operations that a BaguaBucket runs on its values, made of Gossamer's collectives, topologies and algorithms.

An operation runs on the thread of the algorithm's Background, and blocks. The arithmetic of averaging, pairing and
codecs is elsewhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.algorithms.decentralized import average_with_peers
from gossamer.algorithms.low_precision_decentralized import exchange_differences
from gossamer.bagua.hooked.values import BucketValues
from gossamer.codec import Codec, MinMaxUInt8
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.errors import ConfigError
from gossamer.topology import Ring, ShiftOne, resolve


def codec_of(what: str, compression: str | None) -> Codec | None:
    """The codec that Bagua calls by this name, or None for None. ConfigError for another name."""
    if compression not in (None, "MinMaxUInt8"):
        raise ConfigError(f"{what}: compression must be 'MinMaxUInt8' or None, got {compression!r}")
    return MinMaxUInt8() if compression is not None else None


def require_peers(where: str, mode: str, *modes: str) -> None:
    """ConfigError unless the peer_selection_mode is one of `modes`. Its text begins with `where`."""
    if mode not in modes:
        raise ConfigError(
            f"{where}: peer_selection_mode must be {' or '.join(map(repr, modes))}, got {mode!r}"
        )


def require_sizes(what: str, bucket: BucketValues, tensors: Sequence[Tensor]) -> None:
    """ConfigError unless each tensor is contiguous and has the bucket's dtype and number of elements, with padding."""
    like = bucket.flattened_tensor()
    for tensor in tensors:
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype or not tensor.is_contiguous():
            raise ConfigError(
                f"{what}: tensors must be contiguous and have the bucket's {like.numel()} elements of {like.dtype}, "
                f"got {tensor.numel()} of {tensor.dtype}"
            )


def centralized(
    bucket: BucketValues, comm: Communicator, *, average: bool, in_order: bool, codec: Codec | None
) -> None:
    """Replaces the bucket's values by their mean or sum over the ranks, in place."""
    op, in_order = "mean" if average else "sum", in_order and codec is None
    with bucket.values() as values:
        all_reduce(values, op=op, codec=codec, deterministic=in_order, group=comm)
    if codec is not None and bucket.padding_tensor is not None:
        bucket.padding_tensor.zero_()


class Decentralized:
    """Averages the bucket's values with peers, into peer_weight. copy_back_peer_weight() copies that to the bucket."""

    def __init__(
        self, bucket: BucketValues, comm: Communicator, peer_weight: Tensor, peer_selection_mode: str
    ) -> None:
        what = "append_decentralized_synchronous_op"
        require_peers(what, peer_selection_mode, "all", "shift_one")
        require_sizes(what, bucket, [peer_weight])
        self.peer_weight = peer_weight
        self._bucket, self._comm, self._round = bucket, comm, 0
        self._topology = ShiftOne() if peer_selection_mode == "shift_one" else resolve("all")

    def __call__(self) -> None:
        peer_weight = self.peer_weight.view(-1)
        with self._bucket.values() as values:
            average_with_peers(self._topology, self._comm, values, peer_weight, step=self._round)
        self._round += 1

    def copy_back_peer_weight(self, bucket: BucketValues) -> None:
        """Copies peer_weight to the bucket's values. Call it in the training thread, after the operation."""
        with torch.no_grad(), bucket.values() as values:
            values.copy_(self.peer_weight.view(-1))


def low_precision(
    bucket: BucketValues, comm: Communicator, codec: Codec, replicas: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Exchanges compressed differences of the bucket's values once, on a ring.

    `replicas`: what is known of this rank, of its left and of its right neighbour, changed in place.
    """
    own, left, right = (replica.view(-1) for replica in replicas)
    mixing = Ring().mixing(0, comm.size, comm.rank)
    others = [left, right][: len(mixing.exchanges)]
    with bucket.values() as values:
        exchange_differences(comm, codec, mixing, values, own, others)
    if len(others) == 1:  # two ranks: both neighbours are the other one
        right.copy_(left)
