# DistributedOptimizer for op=Adasum: every rank steps by its own gradients, and what the steps have changed is
# combined. The arithmetic of Adasum is native (csrc/named/adasum). Made by optimizer.py.
"""``AdasumStep``."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer.horovod.torch import asynchronous
from gossamer.horovod.torch.handles import synchronize
from gossamer.horovod.torch.optimizer_arguments import Request, check_passes, request_of
from gossamer.horovod.torch.optimizer_sharing import keep_identity
from gossamer.horovod.torch.passes import Passes


class AdasumStep(torch.optim.Optimizer):
    """What the methods of the optimizer become. Never made as such: DistributedOptimizer() puts it before a class."""

    _reduction: "_Differences"
    _parameter_names: dict[Tensor, str]
    backward_passes_per_step: int
    _groups_argument: Any
    _settings: dict[str, Any]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps by this rank's gradients, and goes where the ranks' steps lead together. Collective.

        Every parameter becomes its value before plus the Adasum, over the ranks, of what the optimizer's own step
        changes in it; that of a parameter without a gradient is 0. Returns what that step returns.

        Raises:
            HorovodInternalError: on every rank, if the reduction failed; the parameters are what they were before.
        """
        start = self._reduction.start()
        loss = super().step(closure)
        self._reduction.finish(start)
        return loss

    def synchronize(self) -> None:
        """Does nothing: gradients are this rank's own."""

    def skip_synchronize(self) -> NoReturn:
        """AssertionError, always: there is nothing to skip."""
        raise AssertionError(
            "hvd.DistributedOptimizer: skip_synchronize() does not go with op=Adasum, which reduces in step()"
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Every parameter waits for so many gradients from now on. ValueError unless a whole number from 1."""
        check_passes("hvd.DistributedOptimizer", passes)
        self.backward_passes_per_step = passes
        self._reduction.passes.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own. AssertionError between the backward that completes gradients, and step()."""
        if self._reduction.passes.complete:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step(): the step would be "
                "lost"
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own. Gradients of a step that was begun are forgotten."""
        self._reduction.passes.reset()
        with keep_identity(self):
            super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; every rank must add alike."""
        super().add_param_group(param_group)
        for place, param in enumerate(self.param_groups[-1]["params"]):
            name = f"allreduce.noname.{len(self.param_groups) - 1}.{place}"
            self._parameter_names.setdefault(param, name)
        self._reduction.passes.remove()
        self._reduction = self._new_reduction()

    def report(self) -> dict[str, Any]:
        """As of any DistributedOptimizer."""
        return {"way": "negotiated", "why": "op is Adasum", "buckets": []}

    def _new_reduction(self) -> "_Differences":
        request = request_of(self, self._parameter_names, self._groups_argument, **self._settings)
        return _Differences(request, self.backward_passes_per_step)


class _Differences:
    """What a step changes in the parameters of a request, and its Adasum."""

    def __init__(self, request: Request, passes: int) -> None:
        self._request = request
        self.passes = Passes(request.names, request.params, passes, self._completed)
        if request.process_set.included():
            self.passes.install()

    @torch.no_grad()
    def start(self) -> list[Tensor]:
        """The parameters as they are now, to give to finish()."""
        return [param.clone() for param in self._members()]

    @torch.no_grad()
    def finish(self, start: list[Tensor]) -> None:
        """Combines what has become of the parameters since then, on every rank."""
        self.passes.reset()
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
        pairs = enumerate(self._request.params)
        return [param for index, param in pairs if index in self._request.trained or param.requires_grad]

    def _completed(self, index: int) -> None:
        """step() looks at what is there."""
