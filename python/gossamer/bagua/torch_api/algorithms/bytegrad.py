"""Bagua's bytegrad, as gossamer.ByteGrad with Bagua's codec."""

from gossamer import algorithms
from gossamer.bagua.torch_api.algorithms.base import NativeAlgorithm
from gossamer.codec import MinMaxUInt8


class ByteGradAlgorithm(NativeAlgorithm):
    """The mean (or sum) of gradients over the ranks, in 8 bits.

    Args:
        hierarchical: exact inside hosts, 8 bits on the way across; so on one host nothing is lost.
        average: the mean, or the sum.
    """

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical = self.by_hosts = hierarchical
        self.average = average

    def native(self) -> algorithms.Algorithm:
        return algorithms.ByteGrad(average=self.average, codec=MinMaxUInt8())
