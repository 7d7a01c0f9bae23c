"""Bagua's gradient_allreduce, as gossamer.GradientAllReduce."""

from typing import Any

from gossamer import algorithms
from gossamer.bagua.torch_api.algorithms.native import NativeAlgorithm, NativeImpl


class GradientAllReduceAlgorithm(NativeAlgorithm):
    """The mean (or sum) of gradients over the ranks.

    Args:
        hierarchical: sum inside hosts first. It is the mean over ranks, also where hosts have unlike numbers of them.
        average: the mean, or the sum.
    """

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average

    def native(self) -> algorithms.Algorithm:
        return algorithms.GradientAllReduce(average=self.average)

    def reify(self, process_group: Any) -> NativeImpl:
        return NativeImpl(process_group, self.native(), by_hosts=self.hierarchical)


GradientAllReduce = GradientAllReduceAlgorithm  # the name in the example of Bagua's with_bagua()
