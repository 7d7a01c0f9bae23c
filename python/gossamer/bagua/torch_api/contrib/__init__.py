"""What stands beside training: fused optimizers, balanced samplers, a cache of samples, synchronised BatchNorm."""

from gossamer.bagua.torch_api.contrib.cache_loader import CacheLoader
from gossamer.bagua.torch_api.contrib.cached_dataset import CachedDataset
from gossamer.bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer
from gossamer.bagua.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "fuse_optimizer",
]
