"""BatchNorm over the joined batches of all ranks, on CPU and GPU. Batch sizes may differ between ranks.

Forward makes one all-gather (count, mean and variance of each rank), backward one all-reduce. gossamer/batchnorm.py has
the arithmetic.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from gossamer.bagua.torch_api.process_group import BaguaProcessGroup
from gossamer.batchnorm import Exchange, JoinedBatchNorm
from gossamer.collectives import all_gather, all_reduce
from gossamer.errors import ConfigError
from gossamer.torch_private import AnyBatchNorm  # the class by which torch itself knows every BatchNorm


class SyncBatchNorm(JoinedBatchNorm):
    """nn.BatchNorm1d/2d/3d whose training statistics are those of all ranks' batches joined.

    Input [N, C] or [N, C, ...]. N and the further sizes may differ between ranks, and may be 0. In eval mode nothing is
    sent. Gradients of weight and bias are this rank's part, like those of any other parameter.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in nn.BatchNorm2d.
        process_group: a torch or Bagua group, looked up at each forward; None is the default group.

    Raises (in forward):
        ConfigError: a wrong input; no group; or, on all ranks alike, fewer than two values for a channel in all.
    """

    where = "SyncBatchNorm"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def exchange(self) -> Exchange:
        """An all-gather and an all-reduce of the group."""
        group = self.process_group
        if isinstance(group, BaguaProcessGroup):
            group = group.torch_group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"SyncBatchNorm: training needs a group that this rank is in, got {group!r}; "
                f"call init_process_group(), or eval() the module."
            )
        return lambda own: all_gather(own.view(1, -1), group=group), partial(all_reduce, group=group)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replaces every BatchNorm in the module, in place. Returns it, or its replacement if it is a BatchNorm.

        Parameters and buffers stay the same objects, so an optimizer that has them keeps working. A BatchNorm that is
        used in several places has one replacement.
        """
        made: dict[nn.Module, nn.Module] = {}
        for path, child in list(module.named_modules(remove_duplicate=False)):
            if not isinstance(child, AnyBatchNorm) or isinstance(child, cls):
                continue
            if child not in made:
                made[child] = cls._converted(child, process_group)
            if child is module:
                return made[child]
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, made[child])
        return module

    @classmethod
    def _converted(cls, module: AnyBatchNorm, process_group: Any) -> "SyncBatchNorm":
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            raise ConfigError(
                "convert_sync_batchnorm: a lazy BatchNorm has no size yet; run one forward first."
            )
        settings = module.num_features, module.eps, module.momentum, False, module.track_running_stats
        own = cls(*settings, process_group=process_group)
        own.affine, own.training = module.affine, module.training
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(own, name, getattr(module, name))
        return own
