"""Optimizers that step over flat memory."""

from gossamer.bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer, fuse_step, is_fused_optimizer

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]
