"""``ReducingOptimizer``: the methods that both kinds of DistributedOptimizer share."""

from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.torch.optimizer.arguments import check_passes, name_group
from gossamer.horovod.torch.optimizer.sharing import keep_identity
from gossamer.horovod.torch.reduction.request import Request, request_of


class ReducingOptimizer(torch.optim.Optimizer):
    """A base that stands before the optimizer's own class. DistributedOptimizer() makes the objects.

    A subclass defines `_reduction_of`, and says in `_zero_grad_error` why zero_grad() comes too early.
    """

    backward_passes_per_step: int
    _reduction: Any
    _parameter_names: dict[Tensor, str]
    _groups_argument: Any
    _settings: dict[str, Any]
    _zero_grad_error: str

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many gradients every parameter waits for. Raises ValueError unless that is a whole number from 1."""
        check_passes(passes)
        self.backward_passes_per_step = passes
        self._reduction.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Does what the optimizer's own does. Raises AssertionError if gradients wait for step() or are travelling."""
        if self._reduction.under_way:
            raise AssertionError(self._zero_grad_error)
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Does what the optimizer's own does. Gradients of an unfinished step are forgotten."""
        self._reduction.abandon()
        with keep_identity(self):
            super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Does what the optimizer's own does. Every rank must add the same group; the next step compares that."""
        super().add_param_group(param_group)
        name_group(self._parameter_names, len(self.param_groups) - 1, self.param_groups[-1]["params"])
        self._reduction.retire()
        self._begin_reduction()

    def report(self) -> dict[str, Any]:
        """Returns how gradients are reduced.

        "way" is "engine", "negotiated", or "undecided" before the first step; "why" says why it was chosen; "buckets"
        has the names of the parameters in each bucket of the engine.
        """
        buckets = [list(bucket.names) for bucket in self._reduction.buckets]
        return {"way": self._reduction.way, "why": self._reduction.why, "buckets": buckets}

    def _begin_reduction(self) -> None:
        request = request_of(self, self._parameter_names, self._groups_argument, **self._settings)
        self._reduction = self._reduction_of(request, self.backward_passes_per_step)

    def _reduction_of(self, request: Request, passes: int) -> Any:
        raise NotImplementedError
