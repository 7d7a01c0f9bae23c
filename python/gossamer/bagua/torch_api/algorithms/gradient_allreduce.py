"""Bagua's gradient_allreduce, as gossamer.GradientAllReduce."""

from gossamer import algorithms
from gossamer.bagua.torch_api.algorithms.base import NativeAlgorithm


class GradientAllReduceAlgorithm(NativeAlgorithm):
    """The mean (or sum) of gradients over the ranks.

    Args:
        hierarchical: sum inside hosts first. It is the mean over ranks, also where hosts have unlike numbers of them.
        average: the mean, or the sum.
    """

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = self.by_hosts = hierarchical
        self.average = average

    def native(self) -> algorithms.Algorithm:
        return algorithms.GradientAllReduce(average=self.average)


GradientAllReduce = GradientAllReduceAlgorithm  # the name in the example of Bagua's with_bagua()
