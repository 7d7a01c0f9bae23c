# ruff: noqa: F405 (names in __all__ that mpi_ops brings)
"""Horovod's names for PyTorch: ``import gossamer.horovod.torch as hvd``.

The modules that Horovod has too gather names: ``mpi_ops``, ``optimizer``, ``functions``, ``compression``,
``sync_batch_norm`` and ``elastic``. Collectives are in ``operations``, and the gradients of a DistributedOptimizer
in ``reduction``.
"""

from gossamer.horovod.torch import elastic
from gossamer.horovod.torch.functions import *  # noqa: F403
from gossamer.horovod.torch.mpi_ops import *  # noqa: F403
from gossamer.horovod.torch.optimizer import DistributedOptimizer
from gossamer.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["init", "is_initialized", "shutdown"]
__all__ += ["cross_rank", "cross_size", "local_rank", "local_size", "rank", "size"]
__all__ += ["ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built"]
__all__ += ["gloo_enabled", "mpi_enabled", "mpi_threads_supported"]
__all__ += ["start_timeline", "stop_timeline"]
__all__ += ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
__all__ += ["Adasum", "Average", "Compression", "Max", "Min", "Product", "Sum"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "sparse_allreduce_async"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["alltoall", "alltoall_async"]
__all__ += ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]
__all__ += ["HorovodInternalError", "barrier", "join", "poll", "synchronize"]
__all__ += ["DistributedOptimizer", "SyncBatchNorm", "elastic"]
__all__ += ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
