"""What the package takes from torch under private names, in one place.

comm/c10d.py has those that look inside process groups; csrc has the native ones. Nothing else uses a private name of
torch, which tests/repository/test_repo.py checks. Torch has no public twin of any of these. Every layer above calls
them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.parallel.distributed import _BufferCommHookLocation as BufferCommHookLocation
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "AnyBatchNorm",
    "BufferCommHookLocation",
    "at_end_of_backward",
    "default_store",
    "keystr",
    "premultiplier",
    "reduces_in_python",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls `call` in the thread that called backward(), when the backward that runs now has ended.

    Only inside a backward. An error of `call` comes out of backward(). A backward that raises calls nothing.
    """
    # torch has no public hook here; DDP's Reducer and FSDP use the same call. The native engine has its own.
    torch.autograd.Variable._execution_engine.queue_callback(call)


def default_store() -> Any:
    """The store through which the ranks of the default group met; it may outlive the group."""
    return torch.distributed.distributed_c10d._get_default_store()


def reduces_in_python() -> bool:
    """Whether torch.compile leaves the gradients of a DistributedDataParallel to torch's reducer in Python."""
    return str(torch._dynamo.config.optimize_ddp).startswith("python_reducer")


def premultiplier(op: Any) -> float:
    """The factor of a ReduceOp of the kind PREMUL_SUM; only its pickled form tells."""
    return float(op.__getstate__()[1])
