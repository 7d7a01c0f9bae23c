"""Bagua's buckets: tensors that travel together, and the operations on them when all are ready.

A bucket of an algorithm of yours: it is made in tensors_to_buckets, and gets its operations in init_operations.
gossamer.bagua.hooked runs it, and has the operations.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gossamer.bagua.hooked import operations
from gossamer.bagua.hooked.asynchronous import AsynchronousModelAverage
from gossamer.bagua.hooked.values import BucketValues
from gossamer.comm import Communicator
from gossamer.errors import ConfigError


class BaguaBucket(BucketValues):
    """Bagua tensors of one dtype, device and model, and operations on them.

    The operations run in the order in which they were appended, on the same values. `group` in append_...: a group of
    Bagua or torch, or a communicator; None: the model's own.

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
        super().__init__(tensors, name, flatten, alignment)
        self._operations: list[Callable[[], object]] = []
        #: Set by gossamer.bagua.hooked. From a group, and whether sums go by hosts, to an operation's communicator.
        self.communicator_of: Callable[[Any, bool], Communicator] | None = None

    @property
    def backend_bucket(self) -> "BaguaBucket":
        """The bucket itself, for operations that Bagua's scripts hand it to."""
        return self

    def append_python_op(self, python_function: Callable[[str], object], group: Any = None) -> "BaguaBucket":
        """Appends python_function(name of the bucket). It runs off the training thread. `group` is not used."""
        return self._append(lambda: python_function(self.name))

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
        run = partial(
            operations.centralized, self, comm, average=average, in_order=scattergather, codec=codec
        )
        return self._append(run)

    def append_decentralized_synchronous_op(
        self,
        peer_weight: Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: Any = None,
    ) -> operations.Decentralized:
        """Appends the mean of the values over all ranks, or with one peer ("shift_one"), written to peer_weight.

        peer_weight is [numel], with padding. The bucket changes only by copy_back_peer_weight(bucket) of the operation
        that is returned. `hierarchical` has no effect: every rank is a peer.
        """
        comm = self._communicator("append_decentralized_synchronous_op", group)
        operation = operations.Decentralized(self, comm, peer_weight, peer_selection_mode)
        self._append(operation)
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
        comm = self._communicator(what, group)
        replicas = (weight, left_peer_weight, right_peer_weight)
        operations.require_sizes(what, self, replicas)
        return self._append(partial(operations.low_precision, self, comm, codec, replicas))

    def append_asynchronous_model_average_op(
        self, peer_selection_mode: str, group: Any = None
    ) -> AsynchronousModelAverage:
        """Appends one round of averaging, in place, of weights that are trained meanwhile.

        Returns the operation, which locks the weights and can abort. peer_selection_mode: "all".
        """
        comm = self._communicator("append_asynchronous_model_average_op", group)
        operation = AsynchronousModelAverage(self, comm, peer_selection_mode)
        self._append(operation)
        return operation

    def clear_ops(self) -> "BaguaBucket":
        """Removes all operations."""
        self._operations = []
        return self

    def run(self) -> None:
        """For gossamer.bagua.hooked: runs all operations, one after the other."""
        for operation in self._operations:
            operation()

    def asynchronous(self) -> list[AsynchronousModelAverage]:
        """For gossamer.bagua.hooked: the operations that change weights while the model trains."""
        return [each for each in self._operations if isinstance(each, AsynchronousModelAverage)]

    def _append(self, operation: Callable[[], object]) -> "BaguaBucket":
        self._operations.append(operation)
        return self

    def _communicator(self, what: str, group: Any, hierarchical: bool = False) -> Communicator:
        if self.communicator_of is None:
            raise ConfigError(f"{what}: bucket '{self.name}' is no model's yet; append it in init_operations")
        return self.communicator_of(group, hierarchical)
