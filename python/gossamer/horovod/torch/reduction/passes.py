"""``Passes``: counts the gradients of parameters by hooks, and knows which parameters have all of this step.

What is negotiated needs it; Gossamer's engine counts natively.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gossamer.engine import claimants, require_untrained, take_over
from gossamer.errors import ConfigError
from gossamer.horovod.torch.reduction.request import Request


class Passes:
    """The gradients of an optimizer, counted. A parameter is complete with its gradient number `passes` of a step.

    Args:
        passes: how many backwards bring gradients before a step.
    """

    buckets: Sequence[Any] = ()  # of the engine

    def __init__(self, request: Request, passes: int) -> None:
        self.request = request
        self.passes: int = passes
        self._hooks: dict[int, Any] = {}
        self._replaced = False
        take_over(self.params)
        require_untrained([param for param in self.params if param.requires_grad], "hvd.DistributedOptimizer")
        claimants.add(self)
        self.reset()
        if self.active:
            self.install()

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters that are counted."""
        return self.request.params

    def leave(self) -> None:
        """Ends this object: something that was made later counts some of the parameters, which none may count twice."""
        self.retire()
        self._replaced = True

    def require_own(self) -> None:
        """Raises ConfigError after leave()."""
        if self._replaced:
            raise ConfigError(
                "hvd.DistributedOptimizer: an optimizer or a wrapper that was made later has some of these parameters, "
                "and reduces them; use that one alone"
            )

    @property
    def active(self) -> bool:
        """Whether this rank takes part."""
        return bool(self.request.process_set.included())

    @property
    def under_way(self) -> bool:
        """Whether a parameter has all its gradients."""
        return bool(self.complete)

    def install(self) -> None:
        """Begins to count for the parameters that need gradients now. Idempotent."""
        if len(self._hooks) == len(self.request.params):
            return
        for index, param in enumerate(self.request.params):
            if param.requires_grad and index not in self._hooks:
                hook = partial(_arrived, weakref.ref(self), index)
                self._hooks[index] = param.register_post_accumulate_grad_hook(hook)

    def remove(self) -> None:
        """Ends counting, and forgets the counts. Idempotent."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self.reset()

    def reset(self) -> None:
        """Begins a new step."""
        self._left = [self.passes] * len(self.request.params)
        self.complete: list[int] = []  # in the order in which they became so

    def set_passes(self, passes: int) -> None:
        """Lets every parameter wait for so many gradients from now on."""
        self.passes = passes
        self._left = [passes] * len(self.request.params)

    def abandon(self) -> None:
        """Forgets the gradients of an unfinished step."""
        self.reset()

    def retire(self) -> None:
        """Ends this object, which another one replaces."""
        self.remove()

    def __del__(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def completed(self, index: int) -> None:
        """Learns, in a backward, that this parameter has all gradients of the step. For subclasses."""

    def count(self, index: int, param: Tensor) -> None:
        """Counts a gradient. Raises AssertionError for one too many, or one that cannot be reduced."""
        what = f"hvd.DistributedOptimizer: parameter {self.request.names[index]!r}"
        if self._left[index] <= 0:
            raise AssertionError(
                f"{what} got its gradient more often than backward_passes_per_step ({self.passes}) allows before "
                f"step(); call step() or synchronize() first, give a larger backward_passes_per_step, or drop this "
                f"optimizer if something else trains the model now"
            )
        if param.grad is not None and param.grad.requires_grad:
            raise AssertionError(
                f"{what} has a gradient with a graph (create_graph=True), which cannot be reduced in place"
            )
        self._left[index] -= 1
        if self._left[index] == 0:
            self.complete.append(index)
            self.completed(index)


def _arrived(counter: "weakref.ref[Passes]", index: int, param: Tensor) -> None:
    if (alive := counter()) is not None:
        alive.count(index, param)
