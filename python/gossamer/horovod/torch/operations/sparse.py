"""``sparse_allreduce_async``: the allreduce of sparse tensors, which gathers the entries of all ranks.

A sparse tensor with repeated indices means their sum.
"""

from collections.abc import Callable

import torch

from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.operations.asynchronous import allgather_async
from gossamer.horovod.torch.operations.handles import synchronize
from gossamer.horovod.torch.operations.submission import OPS, Average, Sum, refuse


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begins to reduce a sparse COO tensor. Returns a function that waits and returns the sparse result.

    The result is not coalesced: an index that several ranks hold stands in it several times.

    Args:
        op: Average or Sum.

    Raises:
        ValueError: the tensor is not sparse COO, or op is another one.
    """
    native = process_set.native()
    names = [f"{name}.indices" if name else None, f"{name}.values" if name else None]
    sparse = isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo
    if not sparse or op not in (Average, Sum):
        shown = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        reason = f"needs a sparse COO tensor and op Average or Sum, got {shown} and {OPS.get(op, op)}"
        refuse(process_set, "allgather", names, reason)
    tensor = tensor.detach()
    indices = allgather_async(tensor._indices().t(), names[0], process_set)
    values = allgather_async(tensor._values(), names[1], process_set)

    def wait() -> torch.Tensor:
        all_indices, all_values = synchronize(indices).t(), synchronize(values)
        if op == Average:
            all_values = all_values / native.size
        return torch.sparse_coo_tensor(all_indices, all_values, tensor.size(), check_invariants=False)

    return wait
