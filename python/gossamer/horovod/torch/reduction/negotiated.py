"""``NegotiatedReduction``: gradients reduced by named operations, one for each parameter or group."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.torch.operations import asynchronous
from gossamer.horovod.torch.operations.handles import synchronize, wait_for_all
from gossamer.horovod.torch.reduction.request import Request


class NegotiatedReduction:
    """Reduces the gradients of a request, step by step.

    Args:
        number: the optimizer's number, the same on all ranks.
        sparse: the number of sparse dimensions of each sparse gradient, by index; equal on all ranks.
        early: whether to submit in the backward that completes a parameter, rather than in synchronize().
    """

    def __init__(self, request: Request, number: int, *, sparse: Mapping[int, int], early: bool) -> None:
        self._request, self._early = request, early
        self._sparse = {} if request.sparse_as_dense else dict(sparse)
        # Two models may have the same names, and gradients in flight at the same time.
        self._names = [f"optimizer{number}.{name}" if number else name for name in request.names]
        grouped = [tuple(i for i in group if i not in self._sparse) for group in request.groups]
        members = {index for group in grouped for index in group}
        alone = [(index,) for index in range(len(request.params)) if index not in members]
        self._units = [unit for unit in [*grouped, *alone] if unit]
        self._unit_of = {index: unit for unit in self._units for index in unit}
        self._options: dict[str, Any] = {"op": request.op, "process_set": request.process_set}
        self._factors = {"prescale_factor": 1.0 / request.predivide, "postscale_factor": request.predivide}
        self._begin()

    def completed(self, index: int) -> None:
        """Learns, in a backward, that this parameter has all gradients of the step."""
        unit = self._unit_of[index]
        self._waits_for[unit] -= 1
        if self._early and self._waits_for[unit] == 0:
            self._submit(unit)

    def synchronize(self) -> None:
        """Submits what is left, and waits for all. Raises HorovodInternalError, at the end, if an operation failed."""
        try:
            for unit in self._units:
                if unit not in self._submitted and self._request.is_trained(unit[0]):
                    self._submit(unit)
            wait_for_all(list(self._submitted.values()))
        finally:
            self._begin()

    def abandon(self) -> None:
        """Completes what has begun, because names in flight cannot be submitted again."""
        if self._submitted:
            self.synchronize()

    def close(self, *, crashed: bool = False) -> None:
        """Forgets what was submitted. hvd.shutdown() fails what other ranks wait for, ``crashed`` or not."""
        self._begin()

    def _begin(self) -> None:
        self._waits_for = {unit: len(unit) for unit in self._units}
        self._submitted: dict[tuple[int, ...], Any] = {}

    def _submit(self, unit: tuple[int, ...]) -> None:
        self._submitted[unit] = lambda: None  # not tried again if it raises
        if unit[0] in self._sparse:
            self._submitted[unit] = self._submit_sparse(unit[0])
            return
        gradients = [_Gradient(self._request.params[index], self._request.compression) for index in unit]
        sent: Any = [gradient.sent for gradient in gradients]
        alone = len(unit) == 1
        submit: Any = asynchronous.allreduce_async_ if alone else asynchronous.grouped_allreduce_async_
        name = self._names[unit[0]]
        handle = submit(sent[0] if alone else sent, name=name, **self._options, **self._factors)

        def wait() -> None:
            reduced = synchronize(handle)
            for gradient, tensor in zip(gradients, [reduced] if alone else reduced, strict=True):
                gradient.take(tensor)

        self._submitted[unit] = wait

    def _submit_sparse(self, index: int) -> Any:
        param = self._request.params[index]
        gradient, dims = param.grad, self._sparse[index]
        if gradient is None:
            shape = param.shape
            indices = torch.zeros(dims, 0, dtype=torch.int64, device=param.device)
            values = torch.zeros(0, *shape[dims:], dtype=param.dtype, device=param.device)
            gradient = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(dims)
        finish = asynchronous.sparse_allreduce_async(gradient, self._names[index], **self._options)

        def wait() -> None:
            param.grad = finish()

        return wait


class _Gradient:
    """One gradient in flight: what is sent for it, and how the result becomes the parameter's gradient."""

    def __init__(self, param: Tensor, compression: Any) -> None:
        self._param, self._compression = param, compression
        self._made = param.grad is None
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        gradient = param.grad.detach()
        # A sparse gradient travels in dense form where sparse_as_dense says so, or where the ranks agreed on none.
        self._sparse_dims = gradient.sparse_dim() if gradient.is_sparse else 0
        self._dense = gradient.to_dense() if self._sparse_dims else gradient
        self.sent, self._context = compression.compress(self._dense)

    def take(self, reduced: Tensor) -> None:
        result = self._compression.decompress(reduced, self._context)
        if self._sparse_dims:
            self._param.grad = result.to_sparse(self._sparse_dims)
            return
        gradient = self._param.grad
        if gradient is None:  # the script removed it meanwhile
            self._param.grad = gradient = result
        elif result is not self._dense or gradient.data_ptr() != result.data_ptr():
            gradient.copy_(result)
        if self._made and not self._param.requires_grad and not gradient.any():
            self._param.grad = None  # frozen meanwhile, and no rank has trained it
