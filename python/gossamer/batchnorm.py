"""The arithmetic of a BatchNorm over the batches of all ranks: on CPU and GPU, for unlike batch sizes, in float64.

No communication and no module: faces (bagua, horovod) have the modules, and pass in how the ranks' numbers meet. The
statistics are combined by the parallel form of Welford's method (Chan, Golub, LeVeque 1983).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gossamer.errors import ConfigError
from gossamer.torch_private import AnyBatchNorm  # the class by which torch itself knows every BatchNorm


def moments(x: Tensor) -> Tensor:
    """float64 [1 + 2C] of x [N, C, ...]: values of a channel, each channel's mean, each one's biased variance."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    channels = x.size(1)
    count = x.numel() // channels
    own = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if count:
        own[0] = count
        own[1 + channels :], own[1 : 1 + channels] = torch.var_mean(x.to(_wide(x.dtype)), axes, correction=0)
    return own


def joined(table: Tensor, own_count: int, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [C] and biased variance [C] of all ranks' values, and how many a channel has [], of their moments.

    Args:
        table: [ranks, 1 + 2C].
        own_count: this rank's values of a channel.

    Raises:
        ConfigError: on all ranks alike, if they have not two values for a channel in all.
    """
    channels = (table.size(1) - 1) // 2
    counts, means, variances = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    total = counts.sum()
    if own_count < 2 and total < 2:  # a GPU need not be waited for where this rank has enough
        raise ConfigError(
            f"{where}: training needs two values for a channel over all ranks, got {int(total)}, of "
            f"which {own_count} here."
        )
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    return mean, variance, total


def track(module: AnyBatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Moves the module's running statistics, if it has them, in place."""
    if module.running_mean is None or module.running_var is None:
        return
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    share: Any = module.momentum
    if share is None:  # the plain mean over all batches
        share = 1.0 / module.num_batches_tracked.double()
    unbiased = variance * count / (count - 1)
    for running, batch in ((module.running_mean, mean), (module.running_var, unbiased)):
        running.copy_(running.double() * (1 - share) + batch * share)


def evaluate(module: AnyBatchNorm, x: Tensor) -> Tensor:
    """x normalised by the module's running statistics, or by its own where the module keeps none. Changes nothing."""
    unknown = module.running_mean is None
    return F.batch_norm(
        x, module.running_mean, module.running_var, module.weight, module.bias, unknown, 0.0, module.eps
    )


def normalise(
    module: AnyBatchNorm,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    count: Tensor,
    *,
    add_up: Callable[[Tensor], Tensor],
) -> Tensor:
    """x normalised by the statistics of all ranks, with gradients through them.

    Args:
        add_up: called in backward, on all ranks: the sum over the ranks of a float64 [2, C], which may be in place.
    """
    output: Tensor = _Normalise.apply(
        x, module.weight, module.bias, mean, variance, count, module.eps, add_up
    )
    return output


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
        add_up: Callable[[Tensor], Tensor],
    ) -> Tensor:
        wide = _wide(x.dtype)
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.add_up = add_up
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
        means = ctx.add_up(sums) / count
        centred = gradient - _channels(means[0], x) - normal * _channels(means[1], x)
        factor = inverse if weight is None else inverse * weight
        return _parameter_gradients(ctx, ((centred * _channels(factor, x)).to(x.dtype),), own, weight)


def _parameter_gradients(ctx: Any, first: tuple[Any], own: Tensor, weight: Tensor | None) -> tuple[Any, ...]:
    for_weight = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
    for_bias = own[0].to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
    return (*first, for_weight, for_bias, None, None, None, None, None)


def _channels(values: Tensor, like: Tensor) -> Tensor:
    """[C] as [1, C, 1, ...], in the dtype in which `like` is computed."""
    return values.to(_wide(like.dtype)).view(1, -1, *[1] * (like.dim() - 2))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
