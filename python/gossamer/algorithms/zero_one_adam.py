"""0/1 Adam: Adam without a warm-up, whose ranks send 1 bit an element at some steps and nothing at the others.

Source: Lu, Li, Zhang, De Sa, He 2022, arXiv:2202.06009. The variance takes the exact mean gradient at ever fewer steps.
At the other steps ranks send the sum of the momenta since the last synchronisation. docs/qadam.md lists differences.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.algorithms.base import require_steps
from gossamer.algorithms.qadam import AdamAlgorithm, QAdamOptimizer, adam_method, largest_move, limited
from gossamer.codec import Codec, ErrorFeedback, OneBit
from gossamer.errors import ConfigError
from gossamer.facts import Method


class ZeroOneAdamOptimizer(QAdamOptimizer):
    """Adam that updates v `variance_scaler` times at every step, then as often at every second, every fourth, ...

    After `freeze_steps` steps v stays. The bias correction of v counts its updates. Elements without variance do not
    move; others move by at most `largest_move` times lr. Without the algorithm ZeroOneAdam, one worker trains so.

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.Adam. Every group may have its own.
        freeze_steps: the number of first steps that may update v, at least 1: the learning rate's warm-up.
        variance_scaler: the number of updates of v after which the steps between them double.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_steps: int = 1000,
        *,
        variance_scaler: int = 16,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        require_steps(
            "ZeroOneAdamOptimizer",
            what="positive integer",
            freeze_steps=freeze_steps,
            variance_scaler=variance_scaler,
        )
        self.variance_scaler = variance_scaler
        # The steps taken, set by the algorithm before each step. None without one: each parameter's own count.
        self.steps: int | None = None
        super().__init__(params, lr, freeze_steps, betas, eps, weight_decay)

    def takes_variance(self, step: int) -> bool:
        """Whether v is updated in the step that follows `step` others."""
        phase = (step // self.variance_scaler + 1).bit_length() - 1
        begin = self.variance_scaler * (2**phase - 1)
        return step < self.warmup_steps and (step - begin) % 2**phase == 0

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """The state also holds `update` and `rates`, the sums of rate × m and of rate since x was `anchor`."""
        state = super().state_of(param)
        if "rates" not in state:
            state["rates"] = 0.0
            state["update"], state["anchor"] = torch.zeros_like(state["exp_avg"]), param.detach().clone()
        return state

    def forget_updates(self, param: Tensor) -> None:
        """Sets the sums since the last synchronisation to 0."""
        state = self.state_of(param)
        state["rates"] = 0.0
        state["update"].zero_()

    def take_mean(self, param: Tensor, group: dict[str, Any], mean: Tensor) -> None:
        """Sets x and m as if every rank had made the mean update since the anchor."""
        state = self.state_of(param)
        if state["rates"]:
            limit = largest_move(group) * state["rates"] * (1 - group["betas"][0] ** state["step"])
            state["anchor"].sub_(limited(mean, self._denominator(state, group), limit))
            param.copy_(state["anchor"])
            torch.div(mean, state["rates"], out=state["exp_avg"])
        else:  # no update, or a learning rate of 0: m may be each rank's own
            state["exp_avg"].zero_()
        self.forget_updates(param)

    def _denominator(self, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        variance = state["exp_avg_sq"]
        correction = math.sqrt(1 - group["betas"][1] ** state["variance_steps"])
        return variance.sqrt().div_(correction).add_(group["eps"]).masked_fill_(variance == 0, math.inf)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state_of(param), group["betas"]
        step = self.steps if self.steps is not None else state["step"]
        takes_variance = self.takes_variance(step)
        if not takes_variance and state["variance_steps"] == 0:
            if step < self.warmup_steps:
                return  # the parameter waits for the next update of v
            raise ConfigError(
                f"ZeroOneAdamOptimizer: a parameter of shape {list(param.shape)} got its first gradient after the "
                f"{self.warmup_steps} steps in which v is updated, so it has no variance; use it before, or freeze it"
            )
        grad = self.add_to_momentum(param, group)
        if takes_variance:
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            state["variance_steps"] += 1
        if not state["rates"]:
            state["anchor"].copy_(param)
        state["step"] += 1
        rate = group["lr"] / (1 - beta1 ** state["step"])
        state["rates"] += rate
        state["update"].add_(state["exp_avg"], alpha=rate)
        limit = largest_move(group) * (1 - beta1 ** state["step"])
        param.sub_(limited(state["exp_avg"], self._denominator(state, group), limit), alpha=rate)


class ZeroOneAdam(AdamAlgorithm):
    """Sends exact gradients at steps that update v. At other steps it sends the summed updates in 1 bit, or nothing.

    Ranks synchronise at every step until v is frozen, and for `double_every` steps more. Then they synchronise at every
    second step, at every fourth, ... In between each rank trains on its own. DataParallel's optimizer must be one
    ZeroOneAdamOptimizer.

    Args:
        codec: the codec of the updates. None: ErrorFeedback(OneBit()).
        double_every: the number of steps after which the steps from one synchronisation to the next double.
        longest: the most steps from one synchronisation to the next.
    """

    name = "zero_one_adam"
    methods: ClassVar[tuple[Method, ...]] = (
        adam_method(
            "zero_one_adam",
            lambda _: ZeroOneAdam(),
            "is Adam with a frozen variance whose updates travel in 1 bit",
        ),
    )
    optimizer_class = ZeroOneAdamOptimizer
    field = "update"
    passes = 10  # over the updates, the variance, the anchor and the weights

    def __init__(self, codec: Codec | None = None, *, double_every: int = 32768, longest: int = 16) -> None:
        super().__init__(codec if codec is not None else ErrorFeedback(OneBit()))
        require_steps("ZeroOneAdam", what="positive integer", double_every=double_every, longest=longest)
        self.double_every: int = double_every
        self.longest: int = longest

    def use_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().use_optimizers(optimizers)
        self.freeze_steps: int = self._optimizer.warmup_steps  # public: ranks compare both
        self.variance_scaler: int = self._optimizer.variance_scaler

    @property
    def own_weights(self) -> bool:
        return True

    def averages_gradients(self, step: int) -> bool:
        return bool(self._optimizer.takes_variance(step))

    def synchronises(self, step: int) -> bool:
        """Whether ranks hold equal weights after the step that follows `step` others."""
        frozen_for = max(0, step - self.freeze_steps)
        doublings = min(frozen_for // self.double_every, self.longest.bit_length())
        return (frozen_for + 1) % min(2**doublings, self.longest) == 0

    def before_step(self, step: int) -> None:
        self._optimizer.steps = step

    def close(self, *, crashed: bool = False) -> None:
        self._optimizer.steps = None  # the optimizer goes on alone

    def after_step(self, step: int) -> None:
        if self.averages_gradients(step - 1):
            self.after_consensus()  # the step was made of equal gradients, from equal weights
        elif self.synchronises(step - 1) and not self.alone:
            self._synchronise()

    def after_consensus(self) -> None:
        for param in self._groups():
            if param in self._optimizer.state:
                self._optimizer.forget_updates(param)

    @torch.no_grad()
    def _synchronise(self) -> None:
        views = [
            pair
            for bucket in self._buckets
            for pair in zip(bucket.params, bucket.views("update"), strict=True)
        ]
        for param, view in views:
            view.copy_(self._optimizer.state_of(param)["update"])
        self.average_fields()
        groups = self._groups()
        for param, view in views:
            self._optimizer.take_mean(param, groups[param], view)
