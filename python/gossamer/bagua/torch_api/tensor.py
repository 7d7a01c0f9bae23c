"""Bagua's tensors: a torch tensor with a name (the proxy), and the tensor that travels for it (the effective one).

Functions here; gossamer.bagua.patch() makes methods of torch.Tensor of them. The effective tensor of a parameter is its
gradient, for example. Buckets are in bucket.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer import _C
from gossamer.errors import ConfigError

Getter = Callable[[Tensor], Tensor]
Setter = Callable[[Tensor, Tensor], None]

_REGISTRATION = "_bagua_registration"  # the attribute of a Bagua tensor that holds its _Registration
_unnamed = 0


@dataclass(eq=False)
class _Registration:
    """Makes a tensor a Bagua tensor. It lives on the tensor; copies and pickles of the tensor do not have it."""

    name: str
    module_name: str | None
    getter: Getter | None = None
    setter: Setter | None = None
    mark: Callable[[], None] | None = None  # set while an algorithm has the tensor in a bucket

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
    return getattr(tensor, _REGISTRATION, None) is not None


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
    if not is_bagua_tensor(tensor):
        global _unnamed
        if name is None:
            name, _unnamed = f"bagua_tensor_{_unnamed}", _unnamed + 1
        setattr(tensor, _REGISTRATION, _Registration(name, module_name))
    known = _registration(tensor)
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
    """As :func:`ensure_bagua_tensor`, but registers and returns a new tensor of the same memory."""
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
        there = effective.new_empty(0).set_(storage, storage_offset, effective.shape, stride)
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
    setattr(tensor, _REGISTRATION, None)


def _registration(tensor: Tensor) -> _Registration:
    found: _Registration | None = getattr(tensor, _REGISTRATION, None)
    if found is None:
        raise ConfigError("bagua: this is no Bagua tensor; call ensure_bagua_tensor first")
    return found


# --- the memory of several tensors, for buckets, collectives and fused optimizers ---


def in_a_row(tensors: Sequence[Tensor]) -> Tensor | None:
    """The memory of contiguous tensors as one [sum of elements], if each begins where the one before ends."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    first = filled[0] if filled else tensors[0]
    start = end = first.data_ptr()
    for tensor in filled:
        if tensor.data_ptr() != end or tensor.dtype != first.dtype or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    in_bucket = _C.flat_memory_of(first)
    first = first.detach() if in_bucket is None else in_bucket
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None  # neighbours by chance, not one allocation
    total = (end - start) // first.element_size()
    return first.as_strided((total,), (1,), first.storage_offset())


@contextmanager
def elements(*tensors: Tensor) -> Iterator[Tensor]:
    """Yields all elements in a row, [sum of elements]. What is written to them is in the tensors afterwards."""
    memory = in_a_row(tensors)
    if memory is not None:
        yield memory
        return
    copy = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    yield copy
    for tensor, part in zip(tensors, copy.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
