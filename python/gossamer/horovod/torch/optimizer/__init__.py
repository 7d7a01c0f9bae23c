"""``DistributedOptimizer``: an optimizer of the script's own class whose step() uses the gradients of all ranks.

arguments.py checks, and steps.py has the methods of the two kinds of such optimizers.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.compression import Compression
from gossamer.horovod.torch.operations.submission import Adasum, Average
from gossamer.horovod.torch.optimizer.arguments import check_settings, groups_argument, names_of
from gossamer.horovod.torch.optimizer.steps import AdasumStep, GradientStep, ReducingOptimizer

_DistributedOptimizer = GradientStep  # Horovod's name, which scripts test isinstance() with


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
    """Returns an optimizer whose step() uses the gradients of all ranks. Every rank makes it with equal arguments.

    The result's class is a subclass of the optimizer's class with the same name. It shares groups and state with
    `optimizer`, so schedulers of `optimizer` keep working. Where op is Average or Sum and all gradients are dense,
    Gossamer's engine reduces them as views of flat buckets. Otherwise each gradient is negotiated by name.
    ``result.report()`` says which, and why.

    Args:
        optimizer: any optimizer with the interface of torch.optim.Optimizer.
        named_parameters: (name, parameter) for all parameters of the optimizer; further ones are allowed.
        compression: Compression.none, fp16, bf16, gossamer(codec), or an object with compress() and decompress().
        backward_passes_per_step: the gradients of so many backwards are summed before they are reduced.
        op: Average, Sum, Min, Max, Product, or Adasum, which combines the changes that each rank's own step makes.
        gradient_predivide_factor: f divides gradients before they are summed; the sum is multiplied by f / size.
        num_groups: deprecated; the same as a number in ``groups``.
        groups: the number of groups of parameters that are reduced together, or a list of lists of parameters.
        sparse_as_dense: whether sparse gradients are reduced in dense form.
        process_set: the ranks that take part. The optimizers of other ranks step alone.

    Raises:
        ValueError: before hvd.init(); for names or settings that cannot work.
    """
    settings: dict[str, Any] = {
        "compression": compression,
        "op": op,
        "predivide": gradient_predivide_factor,
        "process_set": process_set,
    }
    check_settings(passes=backward_passes_per_step, **settings)
    groups = groups_argument(groups, num_groups)
    names = names_of(optimizer, named_parameters)
    size = process_set.size()
    made = _adopt(optimizer, AdasumStep if op == Adasum and size is not None and size > 1 else GradientStep)
    made._parameter_names, made._groups_argument = names, groups
    made.backward_passes_per_step = backward_passes_per_step
    made.op, made.gradient_predivide_factor = op, gradient_predivide_factor
    made.sparse_as_dense, made.process_set = sparse_as_dense, process_set
    made._settings = {**settings, "sparse_as_dense": sparse_as_dense}
    made._synchronized, made._should_synchronize = False, True
    made._begin_reduction()
    return made


def _adopt(optimizer: torch.optim.Optimizer, kind: type) -> Any:
    """Returns an object that shares everything with the optimizer. `kind` is its class's first base."""
    own: Any = type(optimizer)
    if issubclass(own, ReducingOptimizer):  # made here: the new one takes its place
        own = own.__bases__[1]
    made = _class_of(kind, own)
    adopted = made.__new__(made)  # without __init__, which would reset the state
    adopted.__dict__.update(optimizer.__dict__)
    # A scheduler has wrapped the optimizer's own step(), which would bypass this class.
    adopted.__dict__.pop("step", None)
    return adopted


@functools.lru_cache(maxsize=64)
def _class_of(kind: type, own: type) -> Any:
    """Returns the class of both. A class is a cycle, so one for each optimizer would pile up until a collection."""
    # Horovod's helpers know its optimizers by __module__.
    names = {"__module__": __name__, "__doc__": own.__doc__, "__reduce_ex__": _refuse_copy}
    return type(own.__name__, (kind, own), names)


def _refuse_copy(optimizer: Any, protocol: Any) -> Any:
    # Optimizer.__getstate__ keeps nothing of this class, so a copy would reduce nothing.
    raise TypeError(
        f"hvd.DistributedOptimizer: {type(optimizer).__name__} cannot be copied or pickled, because its reductions "
        f"belong to this process; copy its state_dict(), or the optimizer that it was made of"
    )
