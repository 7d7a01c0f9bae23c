# Counts the gradients of parameters, by hooks in Python. For what is negotiated; the engine counts natively.
"""``Passes``: which parameters have all gradients of this step."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Passes:
    """A parameter is complete with its gradient number `passes` since the last reset().

    Args:
        names, params: of the same order; what is said by index means them.
        passes: how many backwards bring gradients before a step.
        on_complete: called with an index in the backward that completes it. Its object is held weakly.
    """

    def __init__(
        self, names: Sequence[str], params: Sequence[Tensor], passes: int, on_complete: Callable[[int], None]
    ) -> None:
        self._names, self._params = names, params
        self._on_complete = weakref.WeakMethod(on_complete)
        self._hooks: dict[int, Any] = {}
        self.passes = passes
        self.reset()

    def install(self) -> None:
        """Begins to count the gradients of those that need any by now. Idempotent."""
        if len(self._hooks) == len(self._params):
            return
        this = weakref.ref(self)

        def hook_of(index: int) -> Callable[[Tensor], None]:
            def hook(param: Tensor) -> None:
                alive = this()
                if alive is not None:
                    alive._arrived(index, param)

            return hook

        for index, param in enumerate(self._params):
            if param.requires_grad and index not in self._hooks:
                self._hooks[index] = param.register_post_accumulate_grad_hook(hook_of(index))

    def remove(self) -> None:
        """Ends counting; what was counted is forgotten. Idempotent."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self.reset()

    def reset(self) -> None:
        """A new step begins."""
        self._left = [self.passes] * len(self._params)
        self.complete: list[int] = []  # in the order in which they became so

    def set_passes(self, passes: int) -> None:
        """Every parameter waits for so many gradients from now on."""
        self.passes = passes
        self._left = [passes] * len(self._params)

    def __del__(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def _arrived(self, index: int, param: Tensor) -> None:
        what = f"hvd.DistributedOptimizer: parameter {self._names[index]!r}"
        if self._left[index] <= 0:
            raise AssertionError(
                f"{what} got its gradient more often than backward_passes_per_step ({self.passes}) allows before "
                f"step(); call step() or synchronize() first, or give a larger backward_passes_per_step"
            )
        if param.grad is not None and param.grad.requires_grad:
            raise AssertionError(
                f"{what} has a gradient with a graph (create_graph=True), which cannot be reduced in place"
            )
        self._left[index] -= 1
        if self._left[index] == 0:
            self.complete.append(index)
            on_complete = self._on_complete()
            if on_complete is not None:
                on_complete(index)
