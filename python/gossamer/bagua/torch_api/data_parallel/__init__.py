"""Bagua's DistributedDataParallel, and the engine behind with_bagua()."""

from gossamer.bagua.torch_api.data_parallel import functional
from gossamer.bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from gossamer.bagua.torch_api.data_parallel.wrapper import DistributedDataParallel

__all__ = ["BaguaDistributedDataParallel", "DistributedDataParallel", "functional"]
