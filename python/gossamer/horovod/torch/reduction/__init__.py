"""The gradients of a DistributedOptimizer: counted as they come, and reduced when it is to step.

``reduction`` counts and owns what is under way. In the first step ``choice`` compares the ranks' requests. Then
gradients ride on Gossamer's engine (``engine``), or each is a named operation (``negotiated``).
"""

from gossamer.horovod.torch.reduction.reduction import Reduction

__all__ = ["Reduction"]
