"""The gradients of a DistributedOptimizer: counted as they come, and reduced when it is to step.

``reduction`` counts (by ``passes``) and owns what is under way. In the first step ``request`` compares the ranks'
requests. Then gradients ride on Gossamer's engine (``engine``), or each is a named operation (``negotiated``).
"""
