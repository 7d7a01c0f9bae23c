"""``Passes``: counts the gradients of parameters by hooks, and knows which parameters have all of this step.

It serves what is negotiated; Gossamer's engine counts natively.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Passes:
    """A parameter is complete with its gradient number `passes` since the last reset().

    Args:
        names, params: of the same order; an index means a position in both.
        passes: how many backwards bring gradients before a step.
        on_complete: a method that is called, in the backward, with the index of a complete parameter. Its object is
            held weakly.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        passes: int,
        on_complete: Callable[[int], None] | None = None,
    ) -> None:
        self._names, self._params = names, params
        self._on_complete = None if on_complete is None else weakref.WeakMethod(on_complete)
        self._hooks: dict[int, Any] = {}
        self.passes = passes
        self.reset()

    def install(self) -> None:
        """Begins to count for the parameters that need gradients now. Idempotent."""
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
        """Ends counting, and forgets the counts. Idempotent."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self.reset()

    def reset(self) -> None:
        """Begins a new step."""
        self._left = [self.passes] * len(self._params)
        self.complete: list[int] = []  # in the order in which they became so

    def set_passes(self, passes: int) -> None:
        """Lets every parameter wait for so many gradients from now on."""
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
            if self._on_complete is not None and (on_complete := self._on_complete()) is not None:
                on_complete(index)
