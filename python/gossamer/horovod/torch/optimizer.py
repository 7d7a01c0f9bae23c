# DistributedOptimizer: an optimizer of the script's own class whose step() first reduces the gradients over the ranks.
# Arguments are checked in optimizer_arguments.py, gradients reduced by reduction.py; Adasum is in adasum_optimizer.py.
"""``DistributedOptimizer``."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.adasum_optimizer import AdasumStep
from gossamer.horovod.torch.compression import Compression
from gossamer.horovod.torch.optimizer_arguments import (
    check_passes,
    check_settings,
    groups_argument,
    names_of,
    request_of,
)
from gossamer.horovod.torch.optimizer_sharing import adopt, keep_identity
from gossamer.horovod.torch.reduction import Reduction
from gossamer.horovod.torch.submission import Adasum, Average


class _DistributedOptimizer(torch.optim.Optimizer):
    """What the methods of the optimizer become. Never made as such: DistributedOptimizer() puts it before a class."""

    _reduction: Reduction
    _parameter_names: dict[Tensor, str]
    backward_passes_per_step: int
    _groups_argument: Any
    _settings: dict[str, Any]
    _synchronized: bool
    _should_synchronize: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the reduced gradients, and takes the optimizer's own step. Returns what that returns.

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
        """Waits until every parameter has the reduced gradient; one that got none on this rank adds zeros.

        Collective. For gradients that are to be changed before the step, such as clipped:
        ``optimizer.synchronize(); clip(); with optimizer.skip_synchronize(): optimizer.step()``.

        Raises:
            HorovodInternalError: on every rank, if the reduction failed.
            ValueError: on every rank, in the first step, if parameters or arguments differ between ranks.
        """
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

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Every parameter waits for so many gradients from now on. ValueError unless a whole number from 1."""
        check_passes("hvd.DistributedOptimizer", passes)
        self.backward_passes_per_step = passes
        self._reduction.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own. AssertionError while gradients are being reduced."""
        if self._reduction.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are being reduced"
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own. Gradients of a step that was begun are forgotten."""
        self._reduction.abandon()
        self._synchronized, self._should_synchronize = False, True
        with keep_identity(self):
            super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own. The ranks compare what is reduced anew in the next step: all must add alike."""
        super().add_param_group(param_group)
        known = self._parameter_names
        for place, param in enumerate(self.param_groups[-1]["params"]):
            known.setdefault(param, f"allreduce.noname.{len(self.param_groups) - 1}.{place}")
        self._reduction.retire()
        self._reduction = self._new_reduction()

    def report(self) -> dict[str, Any]:
        """How gradients are reduced: "way" (engine, negotiated, or undecided before the first step), "why" it was
        chosen, and "buckets", their names, of the engine.
        """
        buckets = [list(bucket.names) for bucket in self._reduction.buckets]
        return {"way": self._reduction.way, "why": self._reduction.why, "buckets": buckets}

    def _new_reduction(self) -> Reduction:
        request = request_of(self, self._parameter_names, self._groups_argument, **self._settings)
        return Reduction(request, self.backward_passes_per_step)


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """The optimizer, as one whose step() uses the gradients of all ranks; every rank makes it, in the same way.

    The result is of a subclass of the optimizer's class with the same name. It shares groups and state with
    `optimizer`, so schedulers that hold it go on. Gradients ride on Gossamer's engine, as views of flat buckets, where
    op is Average or Sum and all are dense; else each is negotiated by name. ``result.report()`` tells which.

    Args:
        optimizer: any of torch.optim's kind.
        named_parameters: (name, parameter) of all its parameters, and maybe of others.
        compression: Compression.none, fp16, bf16, gossamer(codec), or an object with compress() and decompress().
        backward_passes_per_step: gradients of so many backwards are summed before they are reduced.
        op: Average, Sum, Min, Max, Product, or Adasum, which combines what each rank's own step would change.
        gradient_predivide_factor: an average is taken as the sum of gradients divided by it, times it over the size.
        num_groups: deprecated; as a number in ``groups``.
        groups: parameters that are reduced together: a number of groups, or a list of lists of parameters.
        sparse_as_dense: sparse gradients are reduced in their dense form.
        process_set: the ranks that take part; the others' optimizers step alone.

    Raises:
        ValueError: before hvd.init(); for names or settings that cannot work.
    """
    check_settings(
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        process_set=process_set,
    )
    groups = groups_argument(groups, num_groups)
    names = names_of(optimizer, named_parameters)
    size = process_set.size()
    kind: Any = AdasumStep if op == Adasum and size is not None and size > 1 else _DistributedOptimizer
    made = adopt(optimizer, kind, module=__name__)
    made._parameter_names = names
    made.backward_passes_per_step = backward_passes_per_step
    made.op, made.gradient_predivide_factor = op, gradient_predivide_factor
    made.sparse_as_dense, made.process_set = sparse_as_dense, process_set
    made._groups_argument = groups
    made._settings = {
        "compression": compression,
        "op": op,
        "predivide": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    made._synchronized, made._should_synchronize = False, True
    made._reduction = made._new_reduction()
    return made
