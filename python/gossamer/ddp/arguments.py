"""torch DDP's arguments, checked, in the engine's terms. What torch refuses has torch's text. Used by wrapper.py."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gossamer import config
from gossamer.comm import Hierarchical, Symmetric, is_communicator
from gossamer.errors import ConfigError, UsageError

MIB = 2**20


def check_model(module: Any) -> None:
    """Raises what torch DDP raises for a model that it cannot wrap."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"DistributedDataParallel: module must be a torch.nn.Module, got {type(module).__name__}"
        )
    if not any(param.requires_grad for param in module.parameters()):
        raise UsageError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    kinds = {param.device.type for param in module.parameters()}
    if len(kinds) != 1:
        raise ConfigError(
            f"DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {kinds}."
        )


def devices(
    module: nn.Module, device_ids: Sequence[Any] | None, output_device: Any
) -> tuple[list[torch.device] | None, torch.device | None]:
    """Where inputs and outputs are to be; None: where they are."""
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigError("device_ids can only be None or contain a single element.")
    own = {param.device for param in module.parameters()}
    if device_ids and next(iter(own)).type != "cpu" and len(own) == 1:
        chosen = _device(device_ids[0])
        if chosen not in own:
            raise ConfigError(
                f"DistributedDataParallel: device_ids must name the model's device {own}, got {chosen}"
            )
        return [chosen], chosen if output_device is None else _device(output_device)
    if device_ids or output_device:
        raise ConfigError(
            f"DistributedDataParallel device_ids and output_device arguments only work with "
            f"single-device/multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
            f"{output_device}, and module parameters {own}."
        )
    return None, None


def _device(given: Any) -> torch.device:
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


def group_of(process_group: Any, device_mesh: Any) -> Any:
    """The process group or communicator; None: the default group."""
    if device_mesh is None:
        known = isinstance(
            process_group, (torch.distributed.ProcessGroup, Hierarchical, Symmetric, type(None))
        )
        if not known and not is_communicator(process_group):
            raise ConfigError(
                f"DistributedDataParallel: process_group must be a ProcessGroup, a communicator, Hierarchical, "
                f"Symmetric or None, got {process_group!r}"
            )
        return process_group
    if process_group is not None:
        raise UsageError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise UsageError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


def bucket_sizes(
    cap_mb: float | None, cap_mb_list: Sequence[float] | None
) -> tuple[int, int | tuple[int, ...]]:
    """Bytes of a bucket, and of the first or the first few."""
    given = list(cap_mb_list or ([cap_mb] if cap_mb is not None else []))
    if not given:
        settings = config.current()
        return settings.bucket_bytes, settings.first_bucket_bytes
    if not all(isinstance(each, (int, float)) and each > 0 for each in given):
        raise ConfigError(f"DistributedDataParallel: bucket_cap_mb must be positive, got {given}")
    *firsts, rest = [max(int(each * MIB), 1) for each in given]
    return rest, tuple(firsts) or rest


def sync_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are copied before forwards, and at wrap."""
    if forward_sync_buffers is None:
        both = True if broadcast_buffers is None else broadcast_buffers
        return both, both
    if broadcast_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and "
            "its value is ignored when `forward_sync_buffers` is provided.",
            FutureWarning,
            stacklevel=3,
        )
    return forward_sync_buffers, True


def delayed(module: nn.Module, named_params: Any, param_to_hook: Any) -> tuple[str, ...]:
    """Names of the parameters whose gradients are to travel after all others, so after `param_to_hook`'s."""
    if (named_params is None) != (param_to_hook is None):
        raise ConfigError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    if named_params is None:
        return ()
    known = {id(param): name for name, param in module.named_parameters()}
    for param in [param_to_hook, *(param for _, param in named_params)]:
        if id(param) not in known:
            raise ConfigError(
                "DistributedDataParallel: delay_all_reduce_named_params and param_to_hook_all_reduce must be "
                "parameters of the module"
            )
    return tuple(sorted(known[id(param)] for _, param in named_params))


def ignored(module: nn.Module) -> list[str]:
    """Names that _set_params_and_buffers_to_ignore_for_model() was given; torch spells one of the root ".name"."""
    names = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return sorted({name.removeprefix(".") for name in names})
