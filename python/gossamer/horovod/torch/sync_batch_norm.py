"""``SyncBatchNorm``: a BatchNorm over the batches of all ranks, by named operations.

gossamer/batchnorm.py has the arithmetic. Each module has names of its own, equal on all ranks.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from gossamer.batchnorm import Exchange, JoinedBatchNorm
from gossamer.horovod.common import basics
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.operations.collectives import allreduce_
from gossamer.horovod.torch.operations.submission import Sum

# Modules are numbered in the order of their first forwards. Each process set counts for itself, since only its ranks
# run the same modules.
_numbers: dict[int | None, Iterator[int]] = defaultdict(itertools.count)
_names: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()


class SyncBatchNorm(JoinedBatchNorm):
    """nn.BatchNorm1d/2d/3d whose training statistics are those of all ranks' batches joined, on CPU and GPU.

    Input [N, C] or [N, C, ...]. N and the further sizes may differ between ranks, and may be 0. A rank in join() adds
    nothing. In eval mode nothing is sent. Gradients of weight and bias are this rank's part.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in nn.BatchNorm2d.
        process_set: the ranks whose batches are joined.

    Raises (in forward):
        ValueError: a wrong input; or, on all ranks alike, fewer than two values for a channel in all.
        HorovodInternalError: on every rank, if the ranks' modules differ, or one has failed.
    """

    where = "hvd.SyncBatchNorm"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def exchange(self) -> Exchange:
        """Sums of rows that only one rank fills, so that a rank in join() can take part."""
        if self not in _names:
            _names[self] = f"sync_batch_norm.{next(_numbers[self.process_set.process_set_id])}"
        name, native = _names[self], self.process_set.native()
        add_up = partial(allreduce_, op=Sum, process_set=self.process_set)

        def gather(own: Tensor) -> Tensor:
            table = own.new_zeros(native.size, own.numel())
            table[native.rank] = own
            return add_up(table, name=f"{name}.statistics")

        return gather, partial(add_up, name=f"{name}.gradients")


@basics.at_shutdown
def _reset() -> None:
    _numbers.clear()
    _names.clear()
