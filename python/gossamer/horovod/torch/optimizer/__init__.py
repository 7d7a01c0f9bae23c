"""``DistributedOptimizer``: an optimizer of the script's own class whose step() uses the gradients of all ranks.

arguments.py checks, sharing.py makes the object, and gradients.py and adasum.py have its methods.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.compression import Compression
from gossamer.horovod.torch.operations.submission import Adasum, Average
from gossamer.horovod.torch.optimizer.adasum import AdasumStep
from gossamer.horovod.torch.optimizer.arguments import check_settings, groups_argument, names_of
from gossamer.horovod.torch.optimizer.gradients import GradientStep
from gossamer.horovod.torch.optimizer.sharing import adopt

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
    kind: Any = AdasumStep if op == Adasum and size is not None and size > 1 else GradientStep
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
    made._begin_reduction()
    return made
