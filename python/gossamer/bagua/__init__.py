"""Bagua's names over Gossamer, module for module: ``import gossamer.bagua.torch_api as bagua``.

Argument translation. Importing it patches nothing, starts nothing and listens nowhere; patch() adds Bagua's methods to
torch's classes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gossamer.bagua.torch_api import tensor
from gossamer.bagua.torch_api.distributed import with_bagua
from gossamer.errors import ConfigError

__all__ = ["patch", "unpatch"]


def _attribute(of: Callable[[torch.Tensor], Any]) -> property:
    """Makes a property that only Bagua tensors have: hasattr() is False for other tensors."""

    def get(each: torch.Tensor) -> Any:
        if not tensor.is_bagua_tensor(each):
            raise AttributeError(f"this is no Bagua tensor, and has no {of.__name__}")
        return of(each)

    return property(get)


_METHODS: dict[tuple[type, str], Any] = {
    (nn.Module, "with_bagua"): with_bagua,
    (torch.Tensor, "bagua_tensor_name"): _attribute(tensor.bagua_tensor_name),
    (torch.Tensor, "bagua_module_name"): _attribute(tensor.bagua_module_name),
    **{
        (torch.Tensor, method.__name__): method
        for method in (
            tensor.is_bagua_tensor,
            tensor.ensure_bagua_tensor,
            tensor.to_bagua_tensor,
            tensor.bagua_getter_closure,
            tensor.bagua_setter_closure,
            tensor.bagua_ensure_grad,
            tensor.bagua_set_storage,
            tensor.bagua_mark_communication_ready,
            tensor.bagua_mark_communication_ready_without_synchronization,
        )
    },
}


def patch() -> None:
    """Adds with_bagua() to torch.nn.Module, and the functions of torch_api.tensor to torch.Tensor. Idempotent.

    Raises:
        ConfigError: somebody else has added one of the names; nothing is changed then.
    """
    for (kind, name), method in _METHODS.items():
        if name in vars(kind) and vars(kind)[name] is not method:
            raise ConfigError(f"gossamer.bagua.patch: {kind.__name__} has a {name} already, from elsewhere")
    for (kind, name), method in _METHODS.items():
        setattr(kind, name, method)


def unpatch() -> None:
    """Takes away what patch() has added. Models keep their algorithms. Idempotent."""
    for (kind, name), method in _METHODS.items():
        if vars(kind).get(name) is method:
            delattr(kind, name)
