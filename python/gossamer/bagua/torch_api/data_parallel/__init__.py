"""The engine behind with_bagua()."""

from gossamer.bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel

__all__ = ["BaguaDistributedDataParallel"]
