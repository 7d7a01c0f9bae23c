"""BatchNorm over the batches of all ranks: on CPU and GPU, for unlike batch sizes, in float64.

The faces (bagua, horovod) say how the ranks' numbers meet. The statistics are combined by the parallel form of
Welford's method (Chan, Golub, LeVeque 1983).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gossamer._ops import accumulate_dtype
from gossamer.errors import ConfigError
from gossamer.torch_private import AnyBatchNorm  # the class by which torch itself knows every BatchNorm

Exchange = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


class JoinedBatchNorm(AnyBatchNorm):
    """A BatchNorm that trains with the statistics of all ranks' batches. A subclass defines `where` and exchange()."""

    where: str  # begins the messages of errors

    def exchange(self) -> Exchange:
        """Returns two collectives over the ranks, both of float64 on the input's device.

        The first, called in forward, returns a row [ranks, n] for each rank's [n]. The second, called in backward,
        returns the sum of the ranks' tensors, and may change its argument.
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Normalises each channel of x [N, C, ...]. In training, running statistics change in place."""
        if x.dim() < 2 or x.size(1) != self.num_features:
            raise ConfigError(
                f"{self.where}: input must be [N, {self.num_features}, ...], got {list(x.shape)}"
            )
        if not self.training:
            own = self.running_mean is None  # it keeps no statistics, and normalises by those of x
            means, variances = self.running_mean, self.running_var
            return F.batch_norm(x, means, variances, self.weight, self.bias, own, 0.0, self.eps)
        gather, add_up = self.exchange()
        mean, variance, count = _joined(gather(_moments(x.detach())), x.numel() // x.size(1), self.where)
        _track(self, mean, variance, count)
        output: Tensor = _Normalise.apply(x, self.weight, self.bias, mean, variance, count, self.eps, add_up)
        return output


def _moments(x: Tensor) -> Tensor:
    """Returns float64 [1 + 2C] of x [N, C, ...]: values in a channel, then means, then biased variances of channels."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    channels = x.size(1)
    count = x.numel() // channels
    own = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if count:
        own[0] = count
        own[1 + channels :], own[1 : 1 + channels] = torch.var_mean(
            x.to(accumulate_dtype(x.dtype)), axes, correction=0
        )
    return own


def _joined(table: Tensor, own_count: int, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean [C] and biased variance [C] of all ranks' values, and the number of values in a channel [].

    Args:
        table: the moments of all ranks, [ranks, 1 + 2C].
        own_count: the number of this rank's values in a channel.

    Raises:
        ConfigError: on all ranks alike, if a channel has fewer than two values in all.
    """
    channels = (table.size(1) - 1) // 2
    counts, means, variances = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    total = counts.sum()
    if own_count < 2 and total < 2:  # no wait for a GPU where this rank alone has enough
        raise ConfigError(
            f"{where}: training needs two values for a channel over all ranks, got {int(total)}, of "
            f"which {own_count} here."
        )
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    return mean, variance, total


def _track(module: AnyBatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Updates the module's running statistics in place, if it has them."""
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
        wide = accumulate_dtype(x.dtype)
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.add_up = add_up
        # As torch does on the CPU: with factor and offset it takes two passes fewer than centring x first.
        factor = inverse if weight is None else inverse * weight
        offset = -mean * factor if bias is None else bias - mean * factor
        return (x.to(wide) * _channels(factor, x) + _channels(offset, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, mean, inverse, count = ctx.saved_tensors
        wide = accumulate_dtype(x.dtype)
        gradient = gradient.to(wide)
        normal = (x.to(wide) - _channels(mean, x)) * _channels(inverse, x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        sums = torch.stack([gradient.sum(axes), (gradient * normal).sum(axes)]).double()
        own = sums.clone()  # the exchange may change its argument
        for_x, for_weight, for_bias = None, None, None
        if ctx.needs_input_grad[0]:
            means = ctx.add_up(sums) / count
            centred = gradient - _channels(means[0], x) - normal * _channels(means[1], x)
            factor = inverse if weight is None else inverse * weight
            for_x = (centred * _channels(factor, x)).to(x.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            for_weight = own[1].to(weight.dtype)
        if weight is not None and ctx.needs_input_grad[2]:
            for_bias = own[0].to(weight.dtype)
        return for_x, for_weight, for_bias, None, None, None, None, None


def _channels(values: Tensor, like: Tensor) -> Tensor:
    """Returns [C] as [1, C, 1, ...], in the dtype in which `like` is computed."""
    return values.to(accumulate_dtype(like.dtype)).view(1, -1, *[1] * (like.dim() - 2))
