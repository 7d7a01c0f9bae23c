"""``GradientStep``: a DistributedOptimizer that reduces the gradients, then takes the optimizer's own step."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from gossamer.horovod.torch.optimizer.base import ReducingOptimizer
from gossamer.horovod.torch.reduction import Reduction
from gossamer.horovod.torch.reduction.request import Request


class GradientStep(ReducingOptimizer):
    """The methods for every op but Adasum."""

    _synchronized: bool  # since the last step
    _should_synchronize: bool
    _zero_grad_error = (
        "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
        "optimizer.synchronize(): the gradients are being reduced"
    )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the reduced gradients, takes the optimizer's own step, and returns what that returns.

        ``closure``: its gradients are reduced each time that the optimizer calls it.
        """
        if not self._should_synchronize:
            self._synchronized = False
            return super().step(closure)
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): the gradients are reduced a second time; use "
                "`with optimizer.skip_synchronize(): optimizer.step()`",
                stacklevel=2,
            )
        self.synchronize()
        self._synchronized = False
        if closure is None:
            return super().step()

        def closure_and_synchronize() -> Any:
            loss = closure()
            self._reduction.synchronize()
            return loss

        return super().step(closure_and_synchronize)

    def synchronize(self) -> None:
        """Waits until every parameter has the reduced gradient. A parameter without a gradient here adds zeros.

        Collective. Use it to change gradients before the step, for example to clip them:
        ``optimizer.synchronize(); clip(); with optimizer.skip_synchronize(): optimizer.step()``.

        Raises:
            HorovodInternalError: on every rank, if the reduction failed.
            ValueError: on every rank, in the first step, if parameters or arguments differ between ranks.
        """
        self._reduction.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, step() takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Does what the optimizer's own does. Gradients of an unfinished step are forgotten."""
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(*args, **kwargs)

    def _reduction_of(self, request: Request, passes: int) -> Reduction:
        return Reduction(request, passes)
