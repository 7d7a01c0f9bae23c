"""Models and optimizers between ranks, by named operations. objects.py has the functions for Python objects."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common import basics
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.objects import allgather_object, broadcast_object
from gossamer.horovod.torch.operations.asynchronous import broadcast_async_
from gossamer.horovod.torch.operations.handles import synchronize, wait_for_all
from gossamer.torch_private import tree_map

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copies tensors from one rank to all ranks of the set, in place. Collective.

    Args:
        params: a state_dict(), named_parameters(), or a list of tensors.
        root_rank: the global rank to copy from.

    Raises:
        ValueError: `params` is something else, or the root is not in the set.
        HorovodInternalError: the ranks' tensors differ in shape or dtype.
    """
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (Tensor, str)):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(
            f"hvd.broadcast_parameters: params must be a state_dict, (name, tensor) tuples or tensors, got "
            f"{type(params).__name__}"
        )
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"hvd.broadcast_parameters: {name!r} must be a tensor, got {type(tensor).__name__}; use "
                f"hvd.broadcast_object() for it"
            )
    handles = [
        broadcast_async_(tensor, root_rank, name=name, process_set=process_set) for name, tensor in named
    ]
    wait_for_all([partial(synchronize, handle) for handle in handles])


@dataclass(frozen=True)
class _Place:
    """Stands in the pickled state for a tensor, which is broadcast by itself."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the state and the groups' options of one rank's optimizer to all ranks of the set, in place. Collective.

    No step is taken, and parameters do not change. If the root's optimizer has no state yet, all have none afterwards.
    If this rank's optimizer had none, its gradients are zeros afterwards, as with Horovod.

    Args:
        root_rank: the global rank to copy from.
        model: its sparse embeddings get sparse zero gradients, as all parameters of SparseAdam do.

    Raises:
        ValueError: for LBFGS; on every rank, if the sizes of an optimizer's groups differ from the root's.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "hvd.broadcast_optimizer_state: the state of torch.optim.LBFGS is one history for all parameters, which "
            "cannot be copied; make a new optimizer on every rank"
        )
    process_set.native()  # a newcomer to an elastic run enters the group here, perhaps with another rank
    tensors: dict[int, Tensor] = {}
    skeleton, is_root = None, basics.rank() == root_rank
    if is_root:
        skeleton = tree_map(partial(_detached, tensors=tensors), torch.optim.Optimizer.state_dict(optimizer))
    skeleton = broadcast_object(
        skeleton, root_rank, name="broadcast_optimizer_state", process_set=process_set
    )
    own = [len(group["params"]) for group in optimizer.param_groups]
    every = allgather_object(own, name="broadcast_optimizer_state.groups", process_set=process_set)
    sizes = [len(group["params"]) for group in skeleton["param_groups"]]
    if any(each != sizes for each in every):
        raise ValueError(
            f"hvd.broadcast_optimizer_state: optimizers must have groups of equal sizes, got {sizes} on "
            f"the root and {every} on the ranks {process_set.ranks}"
        )
    is_new = not optimizer.state
    if not is_root:
        _fill(optimizer, skeleton, tensors)
    named = [(f"broadcast_optimizer_state.{number}", tensor) for number, tensor in sorted(tensors.items())]
    broadcast_parameters(named, root_rank, process_set)
    if is_new:
        _zero_gradients(optimizer, model)


def _zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    embeddings = [] if model is None else [each for each in model.modules() if getattr(each, "sparse", False)]
    sparse = {id(param) for each in embeddings for param in each.parameters()}
    all_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for param in [param for group in optimizer.param_groups for param in group["params"]]:
        if not param.requires_grad:
            continue
        if param.grad is not None:
            param.grad.detach_().zero_()
        elif all_sparse or id(param) in sparse:
            param.grad = torch.zeros_like(param).to_sparse(1)
        else:
            param.grad = torch.zeros_like(param)


def _detached(leaf: Any, *, tensors: dict[int, Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    place = _Place(len(tensors), leaf.shape, leaf.dtype, leaf.device.type == "cpu")
    tensors[place.number] = leaf.detach()
    return place


def _fill(optimizer: torch.optim.Optimizer, skeleton: dict[str, Any], tensors: dict[int, Tensor]) -> None:
    """Gives the optimizer the skeleton's contents. `tensors` gets the memory that the broadcasts are to fill."""
    before = dict(optimizer.state)
    optimizer.state.clear()
    param_of = {
        number: param
        for packed, group in zip(skeleton["param_groups"], optimizer.param_groups, strict=True)
        for number, param in zip(packed["params"], group["params"], strict=True)
    }
    for key, value in skeleton["state"].items():
        param = param_of.get(key)
        own_key = key if param is None else param
        optimizer.state[own_key] = _attached(value, before.get(own_key), param, tensors)
    for group, packed in zip(optimizer.param_groups, skeleton["param_groups"], strict=True):
        first = group["params"][0] if group["params"] else None
        new = _attached(packed, dict(group), first, tensors) | {"params": group["params"]}
        for key in group.keys() - new.keys():
            del group[key]
        group.update(new)


def _attached(value: Any, old: Any, param: Tensor | None, tensors: dict[int, Tensor]) -> Any:
    """Returns the value with a tensor for each _Place: the tensor of `old` where it fits, else a new one."""
    if isinstance(value, dict):
        olds = old if isinstance(old, dict) else {}
        return {key: _attached(each, olds.get(key), param, tensors) for key, each in value.items()}
    if isinstance(value, _Place):
        tensors[value.number] = tensor = _memory(value, old, param)
        return tensor
    return tree_map(
        lambda leaf: _attached(leaf, None, param, tensors) if type(leaf) is _Place else leaf, value
    )


def _memory(place: _Place, old: Any, param: Tensor | None) -> Tensor:
    device = torch.device("cpu") if place.on_cpu or param is None else param.device
    if isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (place.shape, place.dtype, device):
        return old
    if param is not None and param.shape == place.shape:  # keeps its memory format
        return torch.empty_like(param, dtype=place.dtype, device=device, requires_grad=False)
    return torch.empty(place.shape, dtype=place.dtype, device=device)
