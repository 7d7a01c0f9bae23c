"""The tensors of a BaguaBucket and their memory. The operations in this folder read and write them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gossamer.bagua.torch_api.tensor import (
    bagua_getter_closure,
    bagua_module_name,
    bagua_set_storage,
    bagua_tensor_name,
    elements,
    ensure_bagua_tensor,
    in_a_row,
)
from gossamer.errors import ConfigError


class BucketValues:
    """What a BaguaBucket is without its operations. The arguments are BaguaBucket's."""

    def __init__(self, tensors: Sequence[Tensor], name: str, flatten: bool, alignment: int = 1) -> None:
        self.tensors: list[torch.Tensor] = list(tensors)
        self.name: str = name
        self.flatten: bool = flatten
        self.padding_tensor: Tensor | None = None
        self._flat: Tensor | None = None
        self.bagua_module_name: str | None = self._check(alignment)
        missing = -sum(tensor.numel() for tensor in self.effective()) % alignment
        if missing:
            self.padding_tensor = ensure_bagua_tensor(
                self.effective()[0].new_zeros(missing),
                f"bagua_padding_tensor_bucket_{name}",
                self.bagua_module_name,
            )
        if flatten:
            self._flat, offset = self.flattened_tensor(), 0
            for tensor, own in zip(self._every(), self.effective(padding=True), strict=True):
                bagua_set_storage(tensor, self._flat.untyped_storage(), offset)
                offset += own.numel()

    def __repr__(self) -> str:
        return f"bucket '{self.name}' ({len(self.tensors)} tensors, {self.bytes()} bytes)"

    def bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.nbytes for tensor in self.effective())

    def effective(self, *, padding: bool = False) -> list[Tensor]:
        """The tensors that travel: one for each of `tensors`, and with `padding` the padding tensor."""
        return [bagua_getter_closure(tensor) for tensor in (self._every() if padding else self.tensors)]

    def flattened_tensor(self) -> Tensor:
        """A copy of all values, with padding: [numel]."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.effective(padding=True)])

    def check_flatten(self) -> bool:
        """Whether all values lie in a row in memory."""
        return in_a_row(self.effective(padding=True)) is not None

    def flat_memory(self) -> Tensor | None:
        """All values as one tensor [numel], with padding; None if a tensor has left the memory of the bucket."""
        row = in_a_row(self.effective(padding=True))
        here = row is not None and self._flat is not None and row.data_ptr() == self._flat.data_ptr()
        return row if here else None

    def values(self) -> AbstractContextManager[Tensor]:
        """Yields all values as one tensor [numel], with padding. Changes to it are changes of the bucket."""
        return elements(*self.effective(padding=True))

    def _every(self) -> list[Tensor]:
        return self.tensors if self.padding_tensor is None else [*self.tensors, self.padding_tensor]

    def _check(self, alignment: int) -> str | None:
        """Returns the name of the tensors' model. ConfigError if the tensors cannot be one bucket."""
        where = f"BaguaBucket '{self.name}'"
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{where}: alignment must be a positive integer, got {alignment!r}")
        models = {bagua_module_name(tensor) for tensor in self.tensors}
        kinds = {(tensor.dtype, tensor.device) for tensor in self.effective()}
        if len(kinds) != 1 or len(models) != 1:
            raise ConfigError(
                f"{where}: needs tensors of one dtype, device and model, got {len(self.tensors)} "
                f"of {sorted(map(str, kinds))} and {sorted(map(str, models))}"
            )
        names = [bagua_tensor_name(tensor) for tensor in self.tensors]
        if len(set(names)) < len(names):
            raise ConfigError(f"{where}: tensors must have different names, got {names}")
        return models.pop()
