"""Gossamer: data-parallel PyTorch training over whatever network you have.

>>> import gossamer as gs
>>> gs.init()
>>> model = gs.DataParallel(model, optimizer, algorithm=gs.ByteGrad())
"""

__version__ = "0.1.0"

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from gossamer import _native, hooks, optim  # noqa: F401  (_native comes first: it loads gossamer._C)
from gossamer.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    OneBitAdam,
    PowerSGD,
    QAdam,
    QAdamOptimizer,
    Sharded,
    ShardedOptimizer,
    ZeroOneAdam,
    ZeroOneAdamOptimizer,
)
from gossamer.codec import (
    BF16,
    FP16,
    Adaptive,
    ChunkTopK,
    Codec,
    Delta,
    ErrorFeedback,
    Identity,
    Int2,
    Int4,
    Int8,
    MinMaxUInt8,
    OneBit,
    TopK,
)
from gossamer.collectives import all_gather, all_reduce, reduce_scatter
from gossamer.comm import Flat, Hierarchical, HostMemory, Symmetric
from gossamer.comm import register_backend as _register_backend
from gossamer.data_parallel import DataParallel
from gossamer.ddp import DistributedDataParallel
from gossamer.engine import Autotune, Merge, count
from gossamer.engine import report_all as report
from gossamer.errors import CodecError, CommError, ConfigError, GossamerError, UsageError
from gossamer.observe import start_timeline, stop_timeline
from gossamer.process_group import Options
from gossamer.regroup import elastic
from gossamer.runtime import init, is_initialized, local_rank, local_size, rank, shutdown, size
from gossamer.sampler import ElasticSampler

if _TYPE_CHECKING:
    from gossamer import fsdp


_register_backend()  # "gossamer" is a backend of torch.distributed from here on

__all__ = [
    "BF16",
    "FP16",
    "Adaptive",
    "Algorithm",
    "AsyncModelAverage",
    "Autotune",
    "ByteGrad",
    "ChunkTopK",
    "Codec",
    "CodecError",
    "CommError",
    "ConfigError",
    "DataParallel",
    "Decentralized",
    "Delta",
    "DistributedDataParallel",
    "ElasticSampler",
    "ErrorFeedback",
    "Flat",
    "GossamerError",
    "GradientAllReduce",
    "Hierarchical",
    "HostMemory",
    "Identity",
    "Int2",
    "Int4",
    "Int8",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "Merge",
    "MinMaxUInt8",
    "OneBit",
    "OneBitAdam",
    "Options",
    "PowerSGD",
    "QAdam",
    "QAdamOptimizer",
    "Sharded",
    "ShardedOptimizer",
    "Symmetric",
    "TopK",
    "UsageError",
    "ZeroOneAdam",
    "ZeroOneAdamOptimizer",
    "all_gather",
    "all_reduce",
    "count",
    "elastic",
    "fsdp",
    "hooks",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "optim",
    "rank",
    "reduce_scatter",
    "report",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> _Any:
    if name == "fsdp":  # torch's takes a second to import
        return _import_module("gossamer.fsdp")
    raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
