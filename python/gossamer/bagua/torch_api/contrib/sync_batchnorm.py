"""BatchNorm over the batches of all ranks, as if they were one: on CPU and GPU, for unlike batch sizes.

One all-gather in forward (count, mean and variance of each rank), one all-reduce in backward. The statistics
are combined in float64 by the parallel form of Welford's method (Chan, Golub, LeVeque 1983).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm  # the class by which torch itself knows every BatchNorm

from gossamer.bagua.torch_api.process_group import BaguaProcessGroup
from gossamer.errors import ConfigError


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm1d/2d/3d whose training statistics are those of all ranks' batches joined.

    Input [N, C] or [N, C, ...]; N and the further sizes may differ between ranks, also be 0. In eval mode, and
    in training of other modules, nothing is sent. Gradients of weight and bias are this rank's part, as those
    of any other parameter.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in nn.BatchNorm2d.
        process_group: a torch or Bagua group, asked at each forward; None is the default group.

    Raises (in forward):
        ConfigError: a wrong input; no group; or, on all ranks alike, not two values for a channel in all.
    """

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

    def forward(self, x: Tensor) -> Tensor:
        """Normalises each channel; running statistics change in place."""
        if x.dim() < 2 or x.size(1) != self.num_features:
            raise ConfigError(
                f"SyncBatchNorm: input must be [N, {self.num_features}, ...], got {list(x.shape)}."
            )
        if not self.training:
            unknown = self.running_mean is None  # then a batch is normalised by itself
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, unknown, 0.0, self.eps
            )
        group = _torch_group(self.process_group)
        mean, variance, count = _joined_statistics(x.detach(), group)
        self._track(mean, variance, count)
        output: Tensor = _Normalise.apply(x, self.weight, self.bias, mean, variance, count, self.eps, group)
        return output

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replaces every BatchNorm in the module, in place, and returns it (or its replacement, if it is one).

        Parameters and buffers stay the same objects, so an optimizer that has them goes on. One that stands in
        several places has one replacement.
        """
        made: dict[nn.Module, nn.Module] = {}
        for path, child in list(module.named_modules(remove_duplicate=False)):
            if not isinstance(child, _BatchNorm) or isinstance(child, cls):
                continue
            if child not in made:
                made[child] = cls._converted(child, process_group)
            if child is module:
                return made[child]
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, made[child])
        return module

    @classmethod
    def _converted(cls, module: _BatchNorm, process_group: Any) -> "SyncBatchNorm":
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            raise ConfigError(
                "convert_sync_batchnorm: a lazy BatchNorm has no size yet; run one forward first."
            )
        settings = module.num_features, module.eps, module.momentum, False, module.track_running_stats
        own = cls(*settings, process_group=process_group)
        own.affine, own.training = module.affine, module.training
        own.weight, own.bias = module.weight, module.bias
        own.running_mean, own.running_var = module.running_mean, module.running_var
        own.num_batches_tracked = module.num_batches_tracked
        return own

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share: Any = self.momentum
        if share is None:  # the plain mean over all batches
            share = 1.0 / self.num_batches_tracked.double()
        unbiased = variance * count / (count - 1)
        for running, batch in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running.double() * (1 - share) + batch * share)


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, where mean and variance depend on all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        group: Any,
    ) -> Tensor:
        wide = _wide(x.dtype)
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.group = group
        # As factor and offset, as torch does on the CPU: two passes less than centring x first.
        factor = inverse if weight is None else inverse * weight
        offset = -mean * factor if bias is None else bias - mean * factor
        return (x.to(wide) * _channels(factor, x) + _channels(offset, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, mean, inverse, count = ctx.saved_tensors
        wide = _wide(x.dtype)
        gradient = gradient.to(wide)
        normal = (x.to(wide) - _channels(mean, x)) * _channels(inverse, x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        sums = torch.stack([gradient.sum(axes), (gradient * normal).sum(axes)]).double()
        own = sums.clone()
        if not ctx.needs_input_grad[0]:
            return _parameter_gradients(ctx, (None,), own, weight)
        dist.all_reduce(sums, group=ctx.group)
        means = sums / count
        centred = gradient - _channels(means[0], x) - normal * _channels(means[1], x)
        factor = inverse if weight is None else inverse * weight
        return _parameter_gradients(ctx, ((centred * _channels(factor, x)).to(x.dtype),), own, weight)


def _parameter_gradients(ctx: Any, first: tuple[Any], own: Tensor, weight: Tensor | None) -> tuple[Any, ...]:
    for_weight = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
    for_bias = own[0].to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
    return (*first, for_weight, for_bias, None, None, None, None, None)


def _joined_statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [C] and biased variance [C] of all ranks' x [N, C, ...], and the number of values of a channel []."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    channels = x.size(1)
    count = x.numel() // channels
    own = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if count:
        own[0] = count
        own[1 + channels :], own[1 : 1 + channels] = torch.var_mean(x.to(_wide(x.dtype)), axes, correction=0)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    table = torch.stack(every)
    counts, means, variances = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    total = counts.sum()
    if count < 2 and total < 2:  # then on every rank; a GPU need not be waited for where this one has enough
        raise ConfigError(
            f"SyncBatchNorm: training needs two values for a channel over all ranks, got {int(total)} "
            f"for an input of {list(x.shape)} here."
        )
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    return mean, variance, total


def _torch_group(group: Any) -> Any:
    if isinstance(group, BaguaProcessGroup):
        group = group.torch_group
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"SyncBatchNorm: training needs a group that this rank is in, got {group!r}; "
            f"call init_process_group(), or eval() the module."
        )
    return group


def _channels(values: Tensor, like: Tensor) -> Tensor:
    """[C] as [1, C, 1, ...], in the dtype in which `like` is computed."""
    return values.to(_wide(like.dtype)).view(1, -1, *[1] * (like.dim() - 2))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
