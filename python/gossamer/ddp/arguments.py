"""Checks torch DDP's arguments, and translates them for the engine. What torch refuses is refused with torch's text."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gossamer import config
from gossamer.algorithms import Algorithm, GradientAllReduce, resolve
from gossamer.comm import KINDS, is_communicator
from gossamer.ddp import precision
from gossamer.errors import ConfigError, UsageError
from gossamer.torch_private import tree_map_only

MIB = 2**20


def check_model(module: Any) -> None:
    """Raise what torch DDP raises for a model that it cannot wrap."""
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
) -> tuple[list[int] | None, int | None]:
    """Return the indices of the devices that inputs and outputs are moved to; None: they stay where they are."""
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigError("device_ids can only be None or contain a single element.")
    own = {param.device for param in module.parameters()}
    kind = next(iter(own)).type
    if device_ids and kind != "cpu" and len(own) == 1:
        chosen = _device(device_ids[0], kind)
        if chosen not in own:
            raise ConfigError(
                f"DistributedDataParallel: device_ids must name the model's device {own}, got {chosen}"
            )
        output = chosen if output_device is None else _device(output_device, kind)
        return [chosen.index], output.index
    if device_ids or output_device:
        raise ConfigError(
            f"DistributedDataParallel device_ids and output_device arguments only work with "
            f"single-device/multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
            f"{output_device}, and module parameters {own}."
        )
    return None, None


def _device(given: Any, kind: str) -> torch.device:
    """Return the device with an index; the current device's index if none is given."""
    device = torch.device(kind, given) if isinstance(given, int) else torch.device(given)
    if device.type != kind:
        raise ConfigError(
            f"DistributedDataParallel: device_ids and output_device must be of the model's type {kind}, got {given!r}"
        )
    index: int | None = device.index
    return torch.device(kind, torch.get_device_module(kind).current_device() if index is None else index)


def moved(tree: Any, device: torch.device) -> Any:
    """Move the tensors in a forward's arguments or output to a device. Sizes of a PackedSequence stay on the CPU."""
    return tree_map_only(
        (Tensor, PackedSequence),
        lambda each: each.to(device, non_blocking=True),
        tree,
        is_leaf=lambda each: isinstance(each, PackedSequence),
    )


def group_of(process_group: Any, device_mesh: Any) -> Any:
    """Return the process group or communicator that the arguments name; None: the default group."""
    if device_mesh is None:
        known = isinstance(process_group, (torch.distributed.ProcessGroup, *KINDS, type(None)))
        if not known and not is_communicator(process_group):
            kinds = ", ".join(kind.__name__ for kind in KINDS)
            raise ConfigError(
                f"DistributedDataParallel: process_group must be a ProcessGroup, a communicator, {kinds} or None, "
                f"got {process_group!r}"
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
    """Return the bytes of a bucket, and the bytes of the first bucket or of the first few."""
    given = list(cap_mb_list or ([cap_mb] if cap_mb is not None else []))
    if not given:
        settings = config.current()
        return settings.bucket_bytes, settings.first_bucket_bytes
    if not all(isinstance(each, (int, float)) and each > 0 for each in given):
        raise ConfigError(f"DistributedDataParallel: bucket_cap_mb must be positive, got {given}")
    *firsts, rest = [max(int(each * MIB), 1) for each in given]
    return rest, tuple(firsts) or rest


def sync_buffers(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, algorithm: Algorithm
) -> tuple[bool, bool]:
    """Return whether buffers are copied before forwards, and whether they are copied when the model is wrapped.

    Raises:
        ConfigError: copies before forwards are asked for, and the ranks of the algorithm do not wait for each other.
    """
    if algorithm.independent:
        if forward_sync_buffers or (broadcast_buffers and forward_sync_buffers is None):
            raise ConfigError(
                f"DistributedDataParallel: under {algorithm!r} ranks train without waiting for each other, but copying "
                f"buffers in each forward would make them wait, got broadcast_buffers={broadcast_buffers} and "
                f"forward_sync_buffers={forward_sync_buffers}; leave both out"
            )
        return False, forward_sync_buffers is not None or broadcast_buffers is not False
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


def algorithm_of(algorithm: str | Algorithm, mixed_precision: Any) -> Algorithm:
    """Return the algorithm. With mixed precision it sends in `reduce_dtype`, which is `param_dtype` if not given.

    Raises:
        ConfigError: `reduce_dtype` is given with an algorithm that sends something else.
    """
    if mixed_precision is None:
        return resolve(algorithm)
    codec = precision.reduce_codec(mixed_precision)
    if algorithm == GradientAllReduce.name:
        return GradientAllReduce(codec=codec)
    chosen = resolve(algorithm)
    alike = isinstance(chosen, GradientAllReduce) and type(chosen.codec) is type(codec)
    if mixed_precision.reduce_dtype is not None and not alike:
        raise ConfigError(
            f"DistributedDataParallel: mixed_precision.reduce_dtype must be what the algorithm sends, got "
            f"{mixed_precision.reduce_dtype} and {chosen!r}; leave reduce_dtype out, or use gradient_allreduce"
        )
    return chosen


def delayed(module: nn.Module, named_params: Any, param_to_hook: Any) -> tuple[str, ...]:
    """Return the names of the parameters whose gradients travel after all others, and so after `param_to_hook`'s."""
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
    """Return the names given to _set_params_and_buffers_to_ignore_for_model(). Torch spells a root's name ".name"."""
    names = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return sorted({name.removeprefix(".") for name in names})
