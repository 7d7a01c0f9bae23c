# BatchNorm over the batches of all ranks. The arithmetic is in gossamer.batchnorm; here is how the ranks' numbers meet,
# by operations with a name of their own for each module.
"""``SyncBatchNorm``."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from gossamer import batchnorm
from gossamer.horovod.common import basics
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.asynchronous import allreduce_async_
from gossamer.horovod.torch.handles import synchronize
from gossamer.horovod.torch.submission import Sum
from gossamer.torch_private import AnyBatchNorm  # the class by which torch itself knows every BatchNorm

# Of modules, in the order of their first forwards: by the number of their process set, since only its ranks count
# alike.
_numbers: dict[int | None, Iterator[int]] = defaultdict(itertools.count)
_names: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()


class SyncBatchNorm(AnyBatchNorm):
    """nn.BatchNorm1d/2d/3d whose training statistics are those of all ranks' batches joined, on CPU and GPU.

    Input [N, C] or [N, C, ...]; N and the further sizes may differ between ranks, also be 0; a rank in join() adds
    nothing. In eval mode nothing is sent. Gradients of weight and bias are this rank's part.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in nn.BatchNorm2d.
        process_set: the ranks whose batches are joined.

    Raises (in forward):
        ValueError: a wrong input; or, on all ranks alike, not two values for a channel in all.
        HorovodInternalError: on every rank: the ranks' modules differ, or one has failed.
    """

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

    def forward(self, x: Tensor) -> Tensor:
        """Normalises each channel; running statistics change in place."""
        if x.dim() < 2 or x.size(1) != self.num_features:
            raise ValueError(
                f"hvd.SyncBatchNorm: input must be [N, {self.num_features}, ...], got {list(x.shape)}"
            )
        if not self.training:
            return batchnorm.evaluate(self, x)
        name = _name(self)
        native = self.process_set.native()
        moments = batchnorm.moments(x.detach())
        # A sum of rows that only one rank fills, so that a rank in join() can take part.
        table = moments.new_zeros(native.size, moments.numel())
        table[native.rank] = moments
        table = _add_up(table, f"{name}.statistics", self.process_set)
        mean, variance, count = batchnorm.joined(table, x.numel() // x.size(1), "hvd.SyncBatchNorm")
        batchnorm.track(self, mean, variance, count)
        add_up = partial(_add_up, name=f"{name}.gradients", process_set=self.process_set)
        return batchnorm.normalise(self, x, mean, variance, count, add_up=add_up)


def _add_up(values: Tensor, name: str, process_set: ProcessSet) -> Tensor:
    summed: Tensor = synchronize(allreduce_async_(values, name=name, op=Sum, process_set=process_set))
    return summed


def _name(module: SyncBatchNorm) -> str:
    if module not in _names:
        _names[module] = f"sync_batch_norm.{next(_numbers[module.process_set.process_set_id])}"
    return _names[module]


@basics.at_shutdown
def _reset() -> None:
    _numbers.clear()
    _names.clear()
