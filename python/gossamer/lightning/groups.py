"""The backend of a strategy's process group, and a check of a group that exists already."""

import torch
import torch.distributed as dist

from gossamer.errors import ConfigError


def backend_for(asked: str | None, device: torch.device) -> str:
    """Return the backend to use: the one asked for; else shared memory on the CPU and NCCL on GPUs."""
    return asked or ("gossamer" if device.type == "cpu" else "cpu:gossamer,cuda:nccl")


def require_group(backend: str | None, *, size: int, device: torch.device) -> None:
    """Raise ConfigError if the default group, which may be older than the strategy, has another size or backend.

    Args:
        backend: the backend that the user has asked for; None: any.
        device: the device whose backend is compared.
    """
    if dist.group.WORLD is None:
        return  # init_process_group() was replaced, as Lightning's own tests do
    if dist.get_world_size() != size:
        raise ConfigError(
            f"setup_distributed: torch.distributed is initialised with {dist.get_world_size()} ranks, and this "
            f"strategy has {size}; call torch.distributed.destroy_process_group() first"
        )
    if backend is None:
        return
    known = dict(part.split(":") for part in str(dist.get_backend_config()).split(","))
    wanted = dict(part.split(":") for part in backend.split(",")) if ":" in backend else {}
    has, wants = known.get(device.type), wanted.get(device.type, None if wanted else backend)
    if wants is not None and has != wants:
        raise ConfigError(
            f"setup_distributed: torch.distributed is initialised with {has} for {device.type} tensors, and "
            f"process_group_backend is {backend!r}; call torch.distributed.destroy_process_group() first"
        )
