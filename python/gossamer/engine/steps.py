"""Counts optimizer steps, and tells the algorithm before and after each step.

A step is over when every watched optimizer has stepped since the previous one. A GradScaler that skips a step calls no
hook, so a skipped step is not counted. If step() is given a closure, "before" is after the closure has run: then the
gradients exist.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gossamer.engine.algorithm import Algorithm
from gossamer.errors import ConfigError


class StepCounter:
    """Counts the steps of optimizers by hooks. It keeps neither the optimizers nor the engine alive.

    Args:
        algorithm: its before_step(count) is called before each optimizer steps, and its after_step(count) when all
            optimizers have stepped.
        on_count: called with the new count, before after_step.

    Attributes:
        deferred: the counts of the steps for which somebody else is to call after_step(); None: nobody does.
        forgive: called with an error of the algorithm, which the step goes on after if it returns True; None: no error
            is forgiven.
    """

    def __init__(self, algorithm: Algorithm, on_count: Callable[[int], None]) -> None:
        self.count: int = 0
        self.deferred: list[int] | None = None
        self.forgive: Callable[[RuntimeError], bool] | None = None
        self._algorithm, self._on_count = algorithm, weakref.WeakMethod(on_count)
        self._hooks: list[Any] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._watched: set[int] = set()
        self._stepped: set[int] = set()

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Count a step whenever all watched optimizers have stepped."""
        counter = weakref.ref(self)

        def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            alive = counter()
            if alive is None:
                return None
            if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
                return (args[0], alive._and_begin(args[1]), *args[2:]), kwargs
            if callable(kwargs.get("closure")):
                return args, {**kwargs, "closure": alive._and_begin(kwargs["closure"])}
            alive._call(alive._algorithm.before_step)
            return None

        def ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            alive = counter()
            if alive is not None:
                alive._ended(id(optimizer))

        for optimizer in optimizers:
            self._watched.add(id(optimizer))
            self._optimizers.append(weakref.ref(optimizer))
            self._hooks += [
                optimizer.register_step_pre_hook(begins),
                optimizer.register_step_post_hook(ended),
            ]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The watched optimizers that still exist, in the order in which they were given."""
        return [optimizer for each in self._optimizers if (optimizer := each()) is not None]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _and_begin(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_and_begin() -> Any:
            loss = closure()
            with torch.no_grad():
                self._call(self._algorithm.before_step)
            return loss

        return closure_and_begin

    def _ended(self, optimizer: int) -> None:
        self._stepped.add(optimizer)
        if self._stepped != self._watched:
            return
        self._stepped.clear()
        self.count += 1
        on_count = self._on_count()
        if on_count is not None:
            on_count(self.count)
        if self.deferred is not None:
            self.deferred.append(self.count)
        else:
            self._call(self._algorithm.after_step)

    def _call(self, moment: Callable[[int], None]) -> None:
        try:
            moment(self.count)
        except RuntimeError as error:  # torch's own too
            if self.forgive is None or not self.forgive(error):
                raise


def optimizers_of(where: str, given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a user gives: one, several or None.

    Raises:
        ConfigError: An element is no optimizer. The text begins with `where`.
    """
    optimizers = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"{where}: optimizer must be a torch.optim.Optimizer, a list of them or None, got {optimizer!r}; "
                f"give the algorithm as algorithm=..."
            )
    return optimizers
