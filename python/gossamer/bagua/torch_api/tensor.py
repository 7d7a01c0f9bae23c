"""Bagua's tensors: a torch tensor with a name (the proxy), and the tensor that travels for it (the effective one).

Functions here; gossamer.bagua.patch() makes methods of torch.Tensor of them. The effective tensor of a parameter is its
gradient, for example. Buckets are in bucket.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigError

Getter = Callable[[Tensor], Tensor]
Setter = Callable[[Tensor, Tensor], None]


class _Registration:
    """Makes a tensor a Bagua tensor. It lives on the tensor; copies and pickles of the tensor do not have it."""

    def __init__(
        self, name: str, module_name: str | None, getter: Getter | None, setter: Setter | None
    ) -> None:
        self.name, self.module_name, self.getter, self.setter = name, module_name, getter, setter
        self.mark: Callable[[], None] | None = None  # set while an algorithm has it in a bucket

    def __reduce__(self) -> Any:
        return type(None), ()


class _BaguaTensorType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and is_bagua_tensor(instance)


class BaguaTensor(metaclass=_BaguaTensorType):
    """For annotations, and for isinstance(): true of registered tensors. Bagua tensors have no class of their own."""

    def __new__(cls, *_: Any, **__: Any) -> "BaguaTensor":
        raise ConfigError("BaguaTensor: Bagua tensors are made by ensure_bagua_tensor() of a tensor")


def is_bagua_tensor(tensor: Tensor) -> bool:
    """Whether ensure_bagua_tensor() was called on it."""
    return getattr(tensor, "_bagua_registration", None) is not None


def ensure_bagua_tensor(
    tensor: Tensor,
    name: str | None = None,
    module_name: str | None = None,
    getter_closure: Getter | None = None,
    setter_closure: Setter | None = None,
) -> Tensor:
    """Registers the tensor, and returns it. Again with the same name replaces the closures.

    Args:
        name: equal on all ranks; by default that of its number among the unnamed.
        module_name: of the model that it belongs to, bagua_ddp.bagua_module_name.
        getter_closure: from the tensor to the one that travels; None: the tensor itself.
        setter_closure: puts another tensor in the place of the one that travels. None: its storage is replaced.

    Raises:
        ConfigError: registered under another name; a setter without a getter.
    """
    if setter_closure is not None and getter_closure is None:
        raise ConfigError("ensure_bagua_tensor: a setter_closure needs a getter_closure")
    known = _registration(tensor) if is_bagua_tensor(tensor) else None
    if known is None:
        global _unnamed
        if name is None:
            name, _unnamed = f"bagua_tensor_{_unnamed}", _unnamed + 1
        _attach(tensor, _Registration(name, module_name, getter_closure, setter_closure))
        return tensor
    if name not in (None, known.name) or module_name not in (None, known.module_name):
        raise ConfigError(
            f"ensure_bagua_tensor: this tensor is '{known.name}' of {known.module_name} already, "
            f"got '{name}' of {module_name}"
        )
    known.getter, known.setter = getter_closure, setter_closure
    return tensor


def to_bagua_tensor(
    tensor: Tensor,
    name: str | None = None,
    module_name: str | None = None,
    getter_closure: Getter | None = None,
    setter_closure: Setter | None = None,
) -> Tensor:
    """A new tensor of the same memory, registered as by ensure_bagua_tensor(); `tensor` stays as it is."""
    view = tensor.detach().view(tensor.dtype)
    return ensure_bagua_tensor(view, name, module_name, getter_closure, setter_closure)


def bagua_tensor_name(tensor: Tensor) -> str:
    """The tensor's name. This and the functions below raise ConfigError if it is no Bagua tensor."""
    return _registration(tensor).name


def bagua_module_name(tensor: Tensor) -> str | None:
    """The name of the model that the tensor belongs to."""
    return _registration(tensor).module_name


def bagua_getter_closure(tensor: Tensor) -> Tensor:
    """The tensor that travels."""
    getter = _registration(tensor).getter
    return getter(tensor) if getter is not None else tensor


def bagua_setter_closure(tensor: Tensor, value: Tensor) -> None:
    """Puts `value` in the place of the tensor that travels. ConfigError without a setter."""
    setter = _registration(tensor).setter
    if setter is None:
        raise ConfigError(f"bagua_setter_closure: '{bagua_tensor_name(tensor)}' has no setter_closure")
    setter(tensor, value)


def bagua_ensure_grad(tensor: Tensor) -> Tensor:
    """Gives the tensor a gradient of zeros if it has none, and returns the tensor."""
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor, requires_grad=False)
    return tensor


def bagua_set_storage(tensor: Tensor, storage: torch.UntypedStorage, storage_offset: int = 0) -> None:
    """Moves the tensor that travels to `storage`, from element `storage_offset` on. It takes the values there."""
    with torch.no_grad():
        effective = bagua_getter_closure(tensor)
        stride = torch.empty(effective.shape, device="meta").stride()
        there = torch.empty(0, dtype=effective.dtype, device=effective.device)
        there.set_(storage, storage_offset, effective.shape, stride)
        if _registration(tensor).setter is None:
            effective.data = there
        else:
            bagua_setter_closure(tensor, there)


def bagua_mark_communication_ready(tensor: Tensor) -> None:
    """Says that the tensor's values may travel.

    Its bucket begins when all of its tensors are ready, and all buckets before it have begun.

    Raises:
        ConfigError: the tensor is in no bucket of a model.
    """
    mark = _registration(tensor).mark
    if mark is None:
        raise ConfigError(
            f"bagua_mark_communication_ready: '{bagua_tensor_name(tensor)}' is in no bucket of a model; "
            f"return its bucket from tensors_to_buckets"
        )
    mark()


def bagua_mark_communication_ready_without_synchronization(tensor: Tensor) -> None:
    """As bagua_mark_communication_ready(). On a GPU a bucket always waits for the stream that marks its last tensor."""
    bagua_mark_communication_ready(tensor)


def set_mark(tensor: Tensor, mark: Callable[[], None]) -> None:
    """For gossamer.bagua.hooked: bagua_mark_communication_ready(tensor) calls `mark` from now on."""
    _registration(tensor).mark = mark


def forget(tensor: Tensor) -> None:
    """For gossamer.bagua.hooked: makes it an ordinary tensor again."""
    _attach(tensor, None)


_unnamed = 0


def _attach(tensor: Tensor, registration: _Registration | None) -> None:
    tensor._bagua_registration = registration  # type: ignore[attr-defined]


def _registration(tensor: Tensor) -> _Registration:
    found = getattr(tensor, "_bagua_registration", None)
    if found is None:
        raise ConfigError("bagua: this is no Bagua tensor; call ensure_bagua_tensor first")
    assert isinstance(found, _Registration)
    return found
