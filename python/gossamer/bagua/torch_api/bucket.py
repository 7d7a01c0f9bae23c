"""Bagua's buckets: tensors that travel together, and the operations on them when all are ready.

A bucket of an algorithm of yours: it is made in tensors_to_buckets, and gets its operations in init_operations.
gossamer.bagua.hooked runs it, and has the operations.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gossamer.bagua.hooked import operations
from gossamer.bagua.hooked.asynchronous import AsynchronousModelAverage
from gossamer.bagua.torch_api.tensor import (
    bagua_getter_closure,
    bagua_module_name,
    bagua_set_storage,
    bagua_tensor_name,
    ensure_bagua_tensor,
)
from gossamer.comm import Communicator
from gossamer.errors import ConfigError

#: Gives the communicator of an operation, from a group (None: the model's own) and whether sums go by hosts.
CommunicatorOf = Callable[[Any, bool], Communicator]


class BaguaBucket:
    """Bagua tensors of one dtype, device and model, and operations on them.

    Args:
        tensors: Bagua tensors, see tensor.py.
        name: for error messages.
        flatten: move the effective tensors into one piece of memory, where operations work in place. A tensor that
            was replaced, as zero_grad() replaces gradients, is copied there and back.
        alignment: the number of elements becomes a multiple of this, by `padding_tensor`, a tensor of zeros.

    Raises:
        ConfigError: no tensors; tensors that differ in dtype, device or model.
    """

    def __init__(self, tensors: Sequence[Tensor], name: str, flatten: bool, alignment: int = 1) -> None:
        self.tensors, self.name = list(tensors), name
        self.bagua_module_name = self._check(alignment)
        first = self.effective()[0]
        missing = -sum(tensor.numel() for tensor in self.effective()) % alignment
        self.padding_tensor: Tensor | None = None
        if missing:
            zeros = torch.zeros(missing, dtype=first.dtype, device=first.device)
            self.padding_tensor = ensure_bagua_tensor(
                zeros, f"bagua_padding_tensor_bucket_{name}", self.bagua_module_name
            )
        self.flatten = flatten
        self._flat: Tensor | None = None
        self._operations: list[Callable[[], object]] = []
        self._communicator_of: CommunicatorOf | None = None
        if flatten:
            self._flatten()

    def __repr__(self) -> str:
        return f"bucket '{self.name}' ({len(self.tensors)} tensors, {self.bytes()} bytes)"

    @property
    def backend_bucket(self) -> "BaguaBucket":
        """The bucket itself, for operations that Bagua's scripts hand it to."""
        return self

    def bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.effective())

    def effective(self, *, padding: bool = False) -> list[Tensor]:
        """The tensors that travel: one for each of `tensors`, and with `padding` the padding tensor."""
        every = (
            [*self.tensors, self.padding_tensor]
            if padding and self.padding_tensor is not None
            else self.tensors
        )
        return [bagua_getter_closure(tensor) for tensor in every]

    def flattened_tensor(self) -> Tensor:
        """A copy of all values, with padding: [numel]."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.effective(padding=True)])

    def check_flatten(self) -> bool:
        """Whether all values lie in a row in memory."""
        tensors = [tensor for tensor in self.effective(padding=True) if tensor.numel()]
        address = tensors[0].data_ptr() if tensors else 0
        for tensor in tensors:
            if tensor.data_ptr() != address or not tensor.is_contiguous():
                return False
            address += tensor.numel() * tensor.element_size()
        return True

    # --- operations: in the order in which they were appended, on the same values ---

    def append_python_op(self, python_function: Callable[[str], object], group: Any = None) -> "BaguaBucket":
        """Appends python_function(name of the bucket). It runs off the training thread. `group` is not used."""
        self._operations.append(lambda: python_function(self.name))
        return self

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: Any = None,
    ) -> "BaguaBucket":
        """Appends the mean (or sum) over the ranks, in place.

        Args:
            hierarchical: sum inside each host first, then between hosts. Compression is used between hosts only.
            scattergather: sum in rank order, so that all ranks hold equal bits on every backend.
            compression: "MinMaxUInt8", or None.
        """
        codec = operations.codec_of("append_centralized_synchronous_op", compression)
        comm = self._communicator("append_centralized_synchronous_op", group, hierarchical)
        self._operations.append(
            lambda: operations.centralized(
                self, comm, average=average, deterministic=scattergather, codec=codec
            )
        )
        return self

    def append_decentralized_synchronous_op(
        self,
        peer_weight: Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: Any = None,
    ) -> "operations.Decentralized":
        """Appends the mean of the values over all ranks, or with one peer ("shift_one"), written to peer_weight.

        peer_weight is [numel], with padding. The bucket changes only by copy_back_peer_weight(bucket) of the operation
        that is returned. `hierarchical` has no effect: every rank is a peer.
        """
        what = "append_decentralized_synchronous_op"
        comm = self._communicator(what, group, False)
        operation = operations.Decentralized(self, comm, peer_weight, peer_selection_mode)
        self._operations.append(operation)
        return operation

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: Tensor,
        left_peer_weight: Tensor,
        right_peer_weight: Tensor,
        hierarchical: bool = True,
        compression: str = "MinMaxUInt8",
        group: Any = None,
    ) -> "BaguaBucket":
        """Appends one exchange of compressed differences on a ring.

        The three tensors [numel] hold what is known of this rank and of its two neighbours. They must begin as their
        values. `hierarchical` has no effect: every rank is on the ring.
        """
        what = "append_low_precision_decentralized_synchronous_op"
        codec = operations.codec_of(what, compression)
        if codec is None:
            raise ConfigError(f"{what}: compression must be 'MinMaxUInt8', got None")
        comm = self._communicator(what, group, False)
        replicas = (weight, left_peer_weight, right_peer_weight)
        self._operations.append(operations.LowPrecision(self, comm, codec, replicas))
        return self

    def append_asynchronous_model_average_op(
        self, peer_selection_mode: str, group: Any = None
    ) -> AsynchronousModelAverage:
        """Appends one round of averaging, in place, of weights that are trained meanwhile.

        Returns the operation, which locks the weights and can abort. peer_selection_mode: "all".
        """
        comm = self._communicator("append_asynchronous_model_average_op", group, False)
        operation = AsynchronousModelAverage(self, comm, peer_selection_mode)
        self._operations.append(operation)
        return operation

    def clear_ops(self) -> "BaguaBucket":
        """Removes all operations."""
        self._operations = []
        return self

    # --- for gossamer.bagua.hooked ---

    def attach(self, communicator_of: CommunicatorOf) -> None:
        """Lets operations be appended. Called before init_operations."""
        self._communicator_of = communicator_of

    def run(self) -> None:
        """Runs all operations, one after the other."""
        for operation in self._operations:
            operation()

    def asynchronous(self) -> list[AsynchronousModelAverage]:
        """The operations that change weights while the model trains."""
        return [each for each in self._operations if isinstance(each, AsynchronousModelAverage)]

    def flat_memory(self) -> Tensor | None:
        """All values as one tensor [numel], with padding; None if a tensor has left the memory of the bucket."""
        if self._flat is None or not self.check_flatten():
            return None
        first = next((tensor for tensor in self.effective(padding=True) if tensor.numel()), self._flat)
        return self._flat if first.data_ptr() == self._flat.data_ptr() else None

    @contextmanager
    def values(self) -> Iterator[Tensor]:
        """Yields all values as one tensor [numel], with padding. Changes to it are changes of the bucket."""
        if (memory := self.flat_memory()) is not None:
            yield memory
            return
        tensors = self.effective(padding=True)
        flat = self.flattened_tensor()
        yield flat
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    def _check(self, alignment: int) -> str | None:
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(
                f"BaguaBucket '{self.name}': alignment must be a positive integer, got {alignment!r}"
            )
        models = {bagua_module_name(tensor) for tensor in self.tensors}
        kinds = {(tensor.dtype, tensor.device) for tensor in self.effective()}
        if len(kinds) != 1 or len(models) != 1:
            raise ConfigError(
                f"BaguaBucket '{self.name}': needs tensors of one dtype, device and model, got {len(self.tensors)} "
                f"of {sorted(map(str, kinds))} and {sorted(map(str, models))}"
            )
        names = [bagua_tensor_name(tensor) for tensor in self.tensors]
        if len(set(names)) < len(names):
            raise ConfigError(f"BaguaBucket '{self.name}': tensors must have different names, got {names}")
        return models.pop()

    def _flatten(self) -> None:
        self._flat = self.flattened_tensor()
        offset = 0
        every = [*self.tensors, self.padding_tensor] if self.padding_tensor is not None else self.tensors
        for tensor in every:
            bagua_set_storage(tensor, self._flat.untyped_storage(), offset)
            offset += bagua_getter_closure(tensor).numel()

    def _communicator(self, what: str, group: Any, hierarchical: bool) -> Communicator:
        if self._communicator_of is None:
            raise ConfigError(f"{what}: bucket '{self.name}' is no model's yet; append it in init_operations")
        return self._communicator_of(group, hierarchical)
