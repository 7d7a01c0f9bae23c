"""QAdam: Adam whose variance is frozen after a warm-up, so that the momentum can travel in 8 bits or fewer.

The algorithm and its signature are Bagua's, after 1-bit Adam (Tang et al. 2021, arXiv:2102.02888), with error feedback.
It differs from Bagua's: `warmup_steps` whole Adam steps come before the switch, the bias correction of the variance
stops with the variance, weight decay goes on, and every parameter group has its own betas.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from gossamer import _C
from gossamer.algorithms.base import (
    Algorithm,
    require_codec,
    require_in_optimizer,
    require_steps,
    whole_chunks,
)
from gossamer.codec import Codec, ErrorFeedback, Int8, OneBit
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.engine import Merge, Unsent, agree_on_finite
from gossamer.errors import ConfigError
from gossamer.facts import COMPRESSED, EXACT, Messages, Method, Settings, Traffic, Trial


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam for `warmup_steps` steps; then p -= lr * limited(m / (1 - beta1^t) / (sqrt(v / (1 - beta2^warmup)) + eps)).

    v stays as the warm-up left it. Where v is almost 0, `limited` lets an element move by at most `largest_move` times
    lr. The QAdam algorithm updates and averages m. Without the algorithm, on one worker, step() updates m. Weight decay
    is added to the gradient, as in torch.optim.Adam.

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.Adam. Every group may have its own.
        warmup_steps: the number of first steps, which are plain Adam's, at least 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        require_steps("QAdamOptimizer", what="positive integer", warmup_steps=warmup_steps)
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ConfigError(
                f"QAdamOptimizer: lr, eps and weight_decay must not be negative, got {lr}, {eps}, {weight_decay}"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"QAdamOptimizer: betas must be at least 0 and below 1, got {betas}")
        self.warmup_steps = warmup_steps
        # Whether the warm-up is over, for all parameters. The algorithm sets it before each step. None without an
        # algorithm: each parameter's own steps count.
        self.frozen: bool | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates every parameter that has a gradient. Returns the closure's loss, or None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """Returns the parameter's state, made of zeros if it is new. variance_steps counts updates of exp_avg_sq."""
        state = self.state[param]
        if not state:
            state["step"] = state["variance_steps"] = 0
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

    def input_of(self, param: Tensor) -> Tensor | None:
        """Returns what step() makes the parameter's step of: its momentum, if the algorithm has averaged it."""
        if self.frozen and param.grad is not None:
            return cast("Tensor", self.state_of(param)["exp_avg"])
        return param.grad

    def take_input(self, param: Tensor, given: Tensor | None) -> None:
        """Takes what input_of() has returned on another rank, whose `frozen` this optimizer has."""
        param.grad = given
        if self.frozen and given is not None:
            self.state_of(param)["exp_avg"].copy_(given)

    def add_to_momentum(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """m <- beta1 m + (1 - beta1) (g + weight_decay p), in place. Returns g + weight_decay p."""
        assert param.grad is not None
        grad: Tensor = param.grad
        if group["weight_decay"]:
            grad = grad.add(param, alpha=group["weight_decay"])
        self.state_of(param)["exp_avg"].lerp_(grad, 1 - group["betas"][0])
        return grad

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state_of(param), group["betas"]
        frozen = self.frozen if self.frozen is not None else state["step"] >= self.warmup_steps
        if not frozen:
            grad = self.add_to_momentum(param, group)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            state["variance_steps"] += 1
        elif self.frozen is None:
            self.add_to_momentum(param, group)  # with an algorithm, the momentum is averaged already
        if state["variance_steps"] == 0:
            raise ConfigError(
                f"QAdamOptimizer: a parameter of shape {list(param.shape)} got its first gradient after the "
                f"{self.warmup_steps} steps of the warm-up, so it has no variance; use it in the warm-up, or freeze it"
            )
        state["step"] += 1
        first = 1 - beta1 ** state["step"]
        second = math.sqrt(1 - beta2 ** state["variance_steps"])
        denominator = state["exp_avg_sq"].sqrt().div_(second).add_(group["eps"])
        if frozen:
            limit = largest_move(group) * first
            param.sub_(limited(state["exp_avg"], denominator, limit), alpha=group["lr"] / first)
        else:
            param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / first)


def largest_move(group: dict[str, Any]) -> float:
    """Returns the bound, in units of lr, on a step of Adam without a frozen variance (arXiv:1412.6980, section 2.1)."""
    beta1, beta2 = group["betas"]
    return max(1.0, (1 - beta1) / math.sqrt(1 - beta2))


def limited(sums: Tensor, denominator: Tensor, limit: float) -> Tensor:
    """Returns sums / denominator, clamped to -limit ... limit, in the memory of `denominator`. NaN stays NaN."""
    return torch.div(sums, denominator, out=denominator).clamp_(-limit, limit)


def adam_method(name: str, make: Callable[[Settings], Algorithm], changes: str) -> Method:
    """Returns the method of an algorithm that takes the place of exact Adam."""
    return Method(name, make, COMPRESSED, changes, "qadam.md", trial=Trial())


class AdamAlgorithm(Algorithm):
    """What QAdam and 0/1 Adam share: their own optimizer, exact gradients at some steps, and one field in a codec.

    Args:
        codec: the codec of the field.
    """

    state_fields: ClassVar[dict[str, Merge]] = {"error": Merge.OWED}
    needs_optimizer = True

    #: QAdamOptimizer or a subclass of it.
    optimizer_class: ClassVar[type[Any]]
    #: The name of the flat memory that is sent instead of gradients.
    field: ClassVar[str]
    #: Passes over a bucket's memory, for the planner, in addition to those of the all-reduce.
    passes: ClassVar[int] = 0

    _optimizer: Any

    def __init__(self, codec: Codec) -> None:
        require_codec(type(self).__name__, codec)
        self.codec = codec

    def use_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().use_optimizers(optimizers)
        self._optimizer = optimizers[0]

    @classmethod
    def make_optimizer(
        cls, params: Iterable[Tensor], *, lr: float, warmup_steps: int
    ) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = cls.optimizer_class(params, lr, warmup_steps)
        return optimizer

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        if not warm:
            return Traffic(in_backward=messages.means())
        jobs = [messages.mean(bucket, self.codec, passes=self.passes) for bucket in messages.buckets]
        return Traffic(in_backward=messages.finite(), after=jobs)

    def block(self) -> int:
        return self.codec.block

    def alignment(self, comm: Communicator) -> int:
        return whole_chunks(comm, self.block())

    def _groups(self) -> dict[Tensor, dict[str, Any]]:
        """Returns the group of each parameter as it is now: the optimizer's load_state_dict() makes other ones."""
        return {param: group for group in self._optimizer.param_groups for param in group["params"]}

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        self._comm, self._buckets = comm, buckets
        require_in_optimizer(type(self).__name__, buckets, self._groups())
        for bucket in buckets:
            bucket.add_field(self.field, comm)
            Unsent.by(self.codec, bucket).prepare()

    def bucket_ready(self, bucket: _C.Bucket) -> None:
        if self.averages_gradients(self.optimizer_steps):
            all_reduce(bucket.flat(), op="mean", group=self._comm)
        else:
            agree_on_finite(self._comm, bucket)

    def average_fields(self) -> None:
        """Averages the field of all buckets over the ranks through the codec, in place, on the engine's worker.

        In a run that survives losses all fields are as they were if that fails.
        """
        changed: list[tuple[Tensor, Tensor]] = []  # memory, and what it held before

        def average(bucket: _C.Bucket) -> None:
            kept = [name for name in (self.field, Unsent.FIELD) if self._survives and name in bucket.fields]
            before = [(bucket.flat(name), bucket.flat(name).clone()) for name in kept]
            try:
                self.reduce_field(
                    bucket, self.field, codec=self.codec, step=self.optimizer_steps, group=self._comm
                )
            except RuntimeError:
                _restore(before)
                raise
            changed.extend(before)

        for bucket in self._buckets:
            self.submit(bucket, average)
        try:
            self.wait()
        except RuntimeError:
            _restore(changed)
            raise

    # --- in a run whose group changes ---

    def why_not_elastic(self) -> str:
        return ""

    def states_alike(self) -> list[Tensor]:
        states = [self._optimizer.state[param] for param in self._groups() if param in self._optimizer.state]
        return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


class QAdam(AdamAlgorithm):
    """Averages gradients exactly during the optimizer's warm-up, and then its momentum through a codec.

    The rank's own gradient is added to the momentum just before the optimizer steps, after a GradScaler's unscaling and
    after clipping. Sending the momentum overlaps with nothing. After the warm-up, param.grad holds the rank's own
    gradient. DataParallel's optimizer must be one QAdamOptimizer.

    Args:
        codec: the codec of the momentum. None: ErrorFeedback(Int8()).
    """

    name = "qadam"
    methods: ClassVar[tuple[Method, ...]] = (
        Method(
            "qadam_warmup",
            lambda _: QAdam(),
            EXACT,
            "is QAdam's warm-up: Adam with exact gradients",
            "qadam.md",
            warm=False,
            advised=False,
        ),
        adam_method("qadam", lambda _: QAdam(), "is Adam with a frozen variance and its momentum in 8 bits"),
    )
    optimizer_class = QAdamOptimizer
    field = "momentum"

    def __init__(self, codec: Codec | None = None) -> None:
        super().__init__(codec if codec is not None else ErrorFeedback(Int8()))

    def use_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().use_optimizers(optimizers)
        self.warmup_steps: int = self._optimizer.warmup_steps  # public: ranks compare it

    def averages_gradients(self, step: int) -> bool:
        return step < self.warmup_steps

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        self._optimizer.frozen = not self.averages_gradients(step)
        if not self._optimizer.frozen:
            return
        groups = self._groups()
        for bucket in self._buckets:
            self._add_gradients(bucket, groups)
        if not self.alone:
            self.average_fields()

    def close(self, *, crashed: bool = False) -> None:
        self._optimizer.frozen = None  # the optimizer goes on alone

    def _add_gradients(self, bucket: _C.Bucket, groups: dict[Tensor, dict[str, Any]]) -> None:
        for param, view in zip(bucket.params, bucket.views("momentum"), strict=True):
            state = self._optimizer.state_of(param)
            if state["exp_avg"].data_ptr() != view.data_ptr():  # new, or loaded
                view.copy_(state["exp_avg"])
                state["exp_avg"] = view
            if param.grad is not None:
                self._optimizer.add_to_momentum(param, groups[param])


class OneBitAdam(QAdam):
    """QAdam whose momentum travels in 1 bit an element, with error feedback: 1-bit Adam."""

    name = "onebit_adam"
    methods: ClassVar[tuple[Method, ...]] = (
        adam_method(
            "onebit_adam", lambda _: OneBitAdam(), "is Adam with a frozen variance and its momentum in 1 bit"
        ),
    )

    def __init__(self, codec: Codec | None = None) -> None:
        super().__init__(codec if codec is not None else ErrorFeedback(OneBit()))


def _restore(changed: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Sets the first tensor of each pair to the second."""
    for tensor, before in changed:
        tensor.copy_(before)
