"""Lightning's distributed utilities, under the names of pytorch_lightning.utilities.distributed 1.7."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gossamer.errors import ConfigError
from gossamer.lightning.namespaces import installed
from gossamer.lightning.reductions import (
    AllGatherGrad,
    all_gather_ddp_if_available,
    gather_all_tensors,
    sync_ddp,
    sync_ddp_if_available,
)

__all__ = [
    "AllGatherGrad",
    "all_gather_ddp_if_available",
    "gather_all_tensors",
    "init_dist_connection",
    "register_ddp_comm_hook",
    "sync_ddp",
    "sync_ddp_if_available",
]


# Without CUDA, torch's DDP refuses hooks with these names, although Gloo and "gossamer" sum bfloat16.
_REFUSED_ON_CPUS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


def init_dist_connection(
    cluster_environment: Any,
    torch_distributed_backend: str,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Call init_process_group() with the rank, size and address of a ClusterEnvironment.

    It sets MASTER_ADDR and MASTER_PORT. It keeps an existing group that has this rank and size.

    Raises:
        ConfigError: A group exists that has another rank or size.
        RuntimeError: torch.distributed is not available.
    """
    connect = installed()[0].of_fabric("utilities.distributed")._init_dist_connection
    connect(cluster_environment, torch_distributed_backend, global_rank, world_size, **kwargs)
    wanted = (
        cluster_environment.global_rank() if global_rank is None else global_rank,
        cluster_environment.world_size() if world_size is None else world_size,
    )
    if (dist.get_rank(), dist.get_world_size()) != wanted:
        raise ConfigError(
            f"init_dist_connection: a group exists in which this is rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"but rank {wanted[0]} of {wanted[1]} is wanted; call torch.distributed.destroy_process_group() first"
        )


def register_ddp_comm_hook(
    model: Any,
    ddp_comm_state: object = None,
    ddp_comm_hook: Callable[..., Any] | None = None,
    ddp_comm_wrapper: Callable[..., Any] | None = None,
    *,
    state: object = None,
) -> None:
    """Call model.register_comm_hook(state, wrapper(hook)), on any device. Do nothing if all arguments are None.

    A hook may be a functools.partial or an object. torch's bf16_compress_hook and bf16_compress_wrapper also work for
    models on the CPU.

    Args:
        state: another name of ddp_comm_state.

    Raises:
        ConfigError: A state or a wrapper has no hook, or both states are given.
    """
    if ddp_comm_state is not None and state is not None:
        raise ConfigError("register_ddp_comm_hook: give ddp_comm_state or state, got both")
    ddp_comm_state = ddp_comm_state if ddp_comm_state is not None else state
    require_hook("register_ddp_comm_hook", ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
    if ddp_comm_hook is None:
        return
    hook = ddp_comm_wrapper(ddp_comm_hook) if ddp_comm_wrapper is not None else ddp_comm_hook
    on_cpu = getattr(model, "device_type", None) == "cpu"
    model.register_comm_hook(state=ddp_comm_state, hook=_named(hook, on_cpu=on_cpu))


def require_hook(where: str, state: object, hook: object, wrapper: object) -> None:
    """Raise ConfigError if there is a state or a wrapper but no hook, so that it would have no effect."""
    given = {"ddp_comm_state": state, "ddp_comm_wrapper": wrapper}
    idle = [name for name, value in given.items() if value is not None]
    if hook is None and idle:
        raise ConfigError(f"{where}: {' and '.join(idle)} needs a ddp_comm_hook, got None")


def _named(hook: Any, *, on_cpu: bool) -> Any:
    """Return the hook as a function with a name that torch accepts. Torch asks a hook for its name."""
    name = getattr(getattr(hook, "func", hook), "__name__", type(hook).__name__)
    refused = on_cpu and name in _REFUSED_ON_CPUS
    if hasattr(hook, "__name__") and hasattr(hook, "__qualname__") and not refused:
        return hook

    def call(state: Any, bucket: dist.GradBucket) -> Any:
        return hook(state, bucket)

    del call.__annotations__["return"]
    call.__name__ = call.__qualname__ = f"{name}_on_cpu" if refused else name
    return call
