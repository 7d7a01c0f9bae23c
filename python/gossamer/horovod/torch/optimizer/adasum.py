"""``AdasumStep``: a DistributedOptimizer for op=Adasum. Every rank takes its own step; Adasum combines the changes.

The arithmetic of Adasum is native (csrc/adasum).
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer.horovod.torch.operations import asynchronous
from gossamer.horovod.torch.operations.handles import synchronize
from gossamer.horovod.torch.optimizer.base import ReducingOptimizer
from gossamer.horovod.torch.reduction.passes import Passes
from gossamer.horovod.torch.reduction.request import Request


class AdasumStep(ReducingOptimizer):
    """The methods for op=Adasum."""

    _zero_grad_error = (
        "optimizer.zero_grad() was called after loss.backward() but before optimizer.step(): the step "
        "would be lost"
    )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the optimizer's own step by this rank's gradients, and combines the ranks' steps. Collective.

        Every parameter becomes its old value plus the Adasum, over the ranks, of the change that the own step made. A
        parameter without a gradient changes by 0. Returns what the own step returns.

        Raises:
            HorovodInternalError: on every rank, if the reduction failed. The parameters then have their old values.
        """
        start = self._reduction.start()
        loss = super().step(closure)
        self._reduction.finish(start)
        return loss

    def synchronize(self) -> None:
        """Does nothing: gradients stay this rank's own."""

    def skip_synchronize(self) -> NoReturn:
        """Raises AssertionError: there is nothing to skip."""
        raise AssertionError(
            "hvd.DistributedOptimizer: skip_synchronize() does not go with op=Adasum, which reduces in step()"
        )

    def _reduction_of(self, request: Request, passes: int) -> "_Differences":
        return _Differences(request, passes)


class _Differences(Passes):
    """What a step changes in the parameters of a request, and its Adasum."""

    way, why = "negotiated", "op is Adasum"
    buckets: tuple[Any, ...] = ()

    def __init__(self, request: Request, passes: int) -> None:
        super().__init__(request.names, request.params, passes)
        self._request = request
        if request.process_set.included():
            self.install()

    @property
    def under_way(self) -> bool:
        """Whether a parameter has all its gradients."""
        return bool(self.complete)

    def abandon(self) -> None:
        """Forgets the gradients of an unfinished step."""
        self.reset()

    def retire(self) -> None:
        """Ends counting: another object takes its place."""
        self.remove()

    @torch.no_grad()
    def start(self) -> list[Tensor]:
        """Returns copies of the parameters, for finish()."""
        return [param.clone() for param in self._members()]

    @torch.no_grad()
    def finish(self, start: list[Tensor]) -> None:
        """Replaces what this rank's step changed since `start` by the Adasum over the ranks."""
        self.reset()
        params, request = self._members(), self._request
        if not request.process_set.included() or not params:
            return
        differences = [param - before for param, before in zip(params, start, strict=True)]
        for param, before in zip(params, start, strict=True):
            param.copy_(before)
        del start
        compressed = [request.compression.compress(difference) for difference in differences]
        handle = asynchronous.grouped_allreduce_async_(
            [tensor for tensor, _ in compressed],
            name="adasum." + request.names[0],
            op=request.op,
            process_set=request.process_set,
        )
        reduced = synchronize(handle)
        for param, tensor, (_, context) in zip(params, reduced, compressed, strict=True):
            param.add_(request.compression.decompress(tensor, context))

    def _members(self) -> list[Tensor]:
        request = self._request
        return [param for index, param in enumerate(request.params) if request.is_trained(index)]
