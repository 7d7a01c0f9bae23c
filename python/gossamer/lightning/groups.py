"""Whether torch's default group, which may be older than a strategy, is the one that the strategy needs."""

import torch
import torch.distributed as dist

from gossamer.errors import ConfigError


def backend_for(asked: str | None, device: torch.device) -> str:
    """What a strategy of ours trains over: what was asked for, or shared memory on the CPU and NCCL on GPUs."""
    return asked or ("gossamer" if device.type == "cpu" else "cpu:gossamer,cuda:nccl")


def require_group(backend: str | None, *, size: int, device: torch.device) -> None:
    """ConfigError if the default group, which may be older than the strategy, has another size or backend.

    Args:
        backend: what the user has asked for, if anything.
        device: what the backend is for.
    """
    if dist.group.WORLD is None:
        return  # there is something else in the place of init_process_group(), as in Lightning's own tests
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
