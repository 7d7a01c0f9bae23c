"""The private names of torch that the package uses, in one place.

comm/c10d.py has those that look inside process groups; csrc has the native ones. Nothing else uses a private name of
torch, which tests/repository/test_repo.py checks. Torch has no public twin of any of these. Every layer above calls
them.
"""

import contextlib
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

__all__ = ["AnyBatchNorm", "BufferCommHookLocation", "at_end_of_backward", "default_store", "premultiplier"]
__all__ += [
    "gathers_for_backward",
    "keystr",
    "outside_transforms",
    "reduces_in_python",
    "replicated_meshes",
    "tree_flatten",
]
__all__ += ["tree_flatten_with_path", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` when the current backward has ended, in the thread that called backward().

    Use it only inside a backward. backward() raises an error of `call`. A backward that raises does not call it.
    """
    # DDP's Reducer and FSDP use the same call. The native engine has a hook of its own.
    torch.autograd.Variable._execution_engine.queue_callback(call)


def default_store() -> Any:
    """Return the store of the default group's rendezvous. It may outlive the group."""
    return torch.distributed.distributed_c10d._get_default_store()


def reduces_in_python() -> bool:
    """Return whether torch.compile leaves a DistributedDataParallel's gradients to torch's reducer in Python."""
    return str(torch._dynamo.config.optimize_ddp).startswith("python_reducer")


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tensors are made and changed as outside of torch.func's transforms."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def premultiplier(op: Any) -> float:
    """Return the factor of a ReduceOp of the kind PREMUL_SUM. Only its pickled form has it."""
    return float(op.__getstate__()[1])


def replicated_meshes(module: Any) -> list[Any]:
    """Return what FSDP knows of each mesh of a sharded module that has a replicate axis.

    FSDP reads the attribute `replicate_process_group` of each at every all-reduce.
    """
    meshes = {id(group.mesh_info): group.mesh_info for group in _fsdp_groups(module)}
    return [mesh for mesh in meshes.values() if hasattr(mesh, "replicate_process_group")]


def gathers_for_backward(module: Any) -> bool:
    """Return whether FSDP now gathers the weights of a sharded module for backward, and not for forward."""
    return any(group._training_state.name == "PRE_BACKWARD" for group in _fsdp_groups(module))


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and later
    return list(filter(None, [state._fsdp_param_group]) if groups is None else groups)
