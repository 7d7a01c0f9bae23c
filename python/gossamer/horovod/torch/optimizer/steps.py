"""The kinds of DistributedOptimizer: ``GradientStep`` reduces gradients, ``AdasumStep`` combines the ranks' steps."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer.horovod.torch.operations import asynchronous
from gossamer.horovod.torch.operations.handles import synchronize
from gossamer.horovod.torch.optimizer.arguments import check_passes, name_group
from gossamer.horovod.torch.reduction.passes import Passes
from gossamer.horovod.torch.reduction.reduction import Reduction
from gossamer.horovod.torch.reduction.request import request_of


class ReducingOptimizer(torch.optim.Optimizer):
    """A base that stands before the optimizer's own class. DistributedOptimizer() makes the objects.

    A subclass says how it reduces, and why zero_grad() comes too early while gradients are under way.
    """

    backward_passes_per_step: int
    _reduces_by: type[Passes]
    _zero_grad_error: str
    _reduction: Any
    _parameter_names: dict[Tensor, str]
    _groups_argument: Any
    _settings: dict[str, Any]
    _synchronized: bool  # since the last step
    _should_synchronize: bool

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
        self._synchronized, self._should_synchronize = False, True
        self._reduction.abandon()
        groups, state = self.param_groups, self.state
        super().load_state_dict(*args, **kwargs)
        # torch puts new objects for groups and state here. The optimizer that this one was made of has the old ones.
        if self.param_groups is not groups and len(self.param_groups) == len(groups):
            for group, new in zip(groups, self.param_groups, strict=True):
                group.clear()
                group.update(new)
            self.param_groups = groups
        if self.state is not state:
            new_state = dict(self.state)
            state.clear()
            state.update(new_state)
            self.state = state

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

    def _require_known(self) -> None:
        """Raises ValueError if the groups have parameters whose gradients are not reduced."""
        known, now = (
            len(self._reduction.request.params),
            sum(len(each["params"]) for each in self.param_groups),
        )
        if now != known:
            raise ValueError(
                f"hvd.DistributedOptimizer: its groups have {now} parameters, and {known} when add_param_group() "
                f"was last called; the gradients of the others are this rank's alone. Add groups by this optimizer's "
                f"own add_param_group(), not by that of the optimizer that it was made of"
            )

    def _begin_reduction(self) -> None:
        request = request_of(self, self._parameter_names, self._groups_argument, **self._settings)
        self._reduction = self._reduces_by(request, self.backward_passes_per_step)


class GradientStep(ReducingOptimizer):
    """The methods for every op but Adasum."""

    _reduces_by = Reduction
    _zero_grad_error = (
        "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
        "optimizer.synchronize(): the gradients are being reduced"
    )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the reduced gradients, takes the optimizer's own step, and returns what that returns.

        ``closure``: its gradients are reduced each time that the optimizer calls it.
        """
        if not self._should_synchronize:
            self._synchronized = False
            return super().step(closure)
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): the gradients are reduced a second time; use "
                "`with optimizer.skip_synchronize(): optimizer.step()`",
                stacklevel=2,
            )
        self.synchronize()
        self._synchronized = False
        if closure is None:
            return super().step()

        def closure_and_synchronize() -> Any:
            loss = closure()
            self._reduction.synchronize()
            return loss

        return super().step(closure_and_synchronize)

    def synchronize(self) -> None:
        """Waits until every parameter has the reduced gradient. A parameter without a gradient here adds zeros.

        Collective. Use it to change gradients before the step, for example to clip them:
        ``optimizer.synchronize(); clip(); with optimizer.skip_synchronize(): optimizer.step()``.

        Raises:
            HorovodInternalError: on every rank, if the reduction failed.
            ValueError: on every rank, in the first step, if parameters or arguments differ between ranks. On this rank,
                if a group was added to the optimizer that this one was made of.
        """
        self._require_known()
        self._reduction.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, step() takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True


class _Differences(Passes):
    """What a step changes in the parameters of a request, and its Adasum, whose arithmetic is in csrc/adasum."""

    way, why = "negotiated", "op is Adasum"

    @torch.no_grad()
    def start(self) -> list[Tensor]:
        """Returns copies of the parameters, for finish(). Raises ConfigError if something else has them now."""
        self.require_own()
        return [param.clone() for param in self._members()]

    @torch.no_grad()
    def finish(self, start: list[Tensor]) -> None:
        """Replaces what this rank's step changed since `start` by the Adasum over the ranks."""
        self.reset()
        params, request = self._members(), self.request
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
        for param, tensor, (_, context) in zip(params, synchronize(handle), compressed, strict=True):
            param.add_(request.compression.decompress(tensor, context))

    def _members(self) -> list[Tensor]:
        return [param for index, param in enumerate(self.request.params) if self.request.is_trained(index)]


class AdasumStep(ReducingOptimizer):
    """The methods for op=Adasum: every rank takes its own step, and Adasum combines the changes."""

    _reduces_by = _Differences
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
        self._require_known()
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
