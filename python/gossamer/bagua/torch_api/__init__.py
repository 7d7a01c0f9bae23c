"""What ``import bagua.torch_api as bagua`` had: models and algorithms, groups, collectives, contrib, checkpoint."""

from gossamer.bagua.torch_api import (
    algorithms,
    bucket,
    checkpoint,
    communication,
    contrib,
    data_parallel,
    distributed,
    env,
    tensor,
)
from gossamer.bagua.torch_api.communication import *  # noqa: F403
from gossamer.bagua.torch_api.distributed import with_bagua
from gossamer.bagua.torch_api.env import get_local_rank, get_local_size, get_rank, get_world_size
from gossamer.bagua.torch_api.tensor import BaguaTensor

__all__ = [
    *communication.__all__,
    "BaguaTensor",
    "algorithms",
    "bucket",
    "checkpoint",
    "communication",
    "contrib",
    "data_parallel",
    "distributed",
    "env",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "tensor",
    "with_bagua",
]
