"""Counts optimizer steps, and tells the algorithm before and after each step.

A step is over when every watched optimizer has stepped since the previous one. A GradScaler that skips a step calls no
hook, so a skipped step is not counted. If step() is given a closure, "before" is after the closure has run: then the
gradients exist.

What is watched follows the parameters. An optimizer that is made later for some of them takes these over from those
before, which go when they have none left. One that stops stepping, while another goes on, is not waited for any more.
When it comes again after a round has ended without it, that counts as one more round.
Nothing here depends on when an optimizer is deleted, because the garbage collector comes at another time on each rank.
"""

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gossamer.engine.algorithm import Algorithm
from gossamer.errors import ConfigError


@dataclass(eq=False)
class _Watched:
    """An optimizer, the ids of the parameters that no later one has taken over, and what it has done in this round."""

    optimizer: "weakref.ref[torch.optim.Optimizer]"
    params: set[int]
    stepped: bool = False
    idle: bool = False  # not waited for
    place: int | None = None  # among those of the last round in which all stepped


class StepCounter:
    """Counts the steps of optimizers by hooks. It keeps neither the optimizers nor the engine alive.

    Args:
        algorithm: its before_step(count) is called before each optimizer steps, and its after_step(count) when all
            optimizers have stepped.
        params: whose optimizers are watched.
        on_begin: called before before_step.
        on_count: called with the new count, before after_step.
        backwards: returns how many backwards have ended.

    Attributes:
        deferred: the counts of the steps for which somebody else is to call after_step(); None: nobody does.
        forgive: called with an error of the algorithm, which the step goes on after if it returns True; None: no error
            is forgiven.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        params: Iterable[torch.Tensor],
        on_begin: Callable[[], None],
        on_count: Callable[[int], None],
        backwards: Callable[[], int],
    ) -> None:
        self.count: int = 0
        self.deferred: list[int] | None = None
        self.forgive: Callable[[RuntimeError], bool] | None = None
        self._algorithm, self._params = algorithm, frozenset(map(id, params))
        self._on_begin, self._on_count = weakref.WeakMethod(on_begin), weakref.WeakMethod(on_count)
        self._ended_backwards = weakref.WeakMethod(backwards)
        self._watched: list[_Watched] = []
        self._closed = False
        # Whose step() has begun, and not ended; and how many times more, as where a step() calls super().step().
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None
        self._again = 0
        self._order: list[_Watched] = []  # of this round's steps
        self._begun_at = self._ended_at = (
            0  # backwards at the first step of this round, and at the end of the last one
        )
        self._usual: int | None = None  # backwards between the steps of the last round in which all stepped

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Count a step whenever all watched optimizers have stepped."""
        for each in optimizers:
            if self._known(each) is None:
                self._watched.append(_Watched(weakref.ref(each), self._own(each)))
        if optimizers:
            _hook_all_optimizers()
            with _lock:
                _counters[next(_numbers)] = self

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The watched optimizers that still exist, in the order in which they were given."""
        return [optimizer for each in self._watched if (optimizer := each.optimizer()) is not None]

    def close(self) -> None:
        """Count no more."""
        self._closed = True

    def _own(self, optimizer: torch.optim.Optimizer) -> set[int]:
        return {id(param) for group in optimizer.param_groups for param in group["params"]} & self._params

    def _known(self, optimizer: torch.optim.Optimizer) -> _Watched | None:
        return next((each for each in self._watched if each.optimizer() is optimizer), None)

    def _follow(self, optimizer: torch.optim.Optimizer) -> _Watched | None:
        """Watch an optimizer that steps, if it has parameters of this model."""
        if known := self._known(optimizer):
            return known
        own = self._own(optimizer)
        if not own:
            return None
        if self._algorithm.optimizer_class is not None:
            raise ConfigError(
                f"{type(self._algorithm).__name__}: the model was wrapped with another optimizer than the "
                f"{type(optimizer).__name__} that steps its parameters now; step that one, or wrap the model again"
            )
        replaces = any(each.params & own for each in self._watched)
        for each in self._watched:
            each.params -= own
        # One that replaces none comes when the others may have ended this round.
        new = _Watched(weakref.ref(optimizer), own, idle=not replaces)
        self._watched = [each for each in self._watched if each.params] + [new]
        return new

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        outer = self._stepping() if self._stepping is not None else None
        # An optimizer that steps by another one, as Lookahead does, is the one that counts.
        if outer is not None and _running_steps(outer) > (outer is optimizer):
            self._again += outer is optimizer
            if inner := self._known(optimizer):
                inner.stepped = True
            return args, kwargs
        watched = None if self._closed else self._follow(optimizer)
        if watched is None:
            return args, kwargs
        self._stepping, self._again = weakref.ref(optimizer), 0
        if watched.stepped or self._has_passed():
            # Those that have not stepped meanwhile do not step any more.
            for each in self._watched:
                each.idle |= not each.stepped and each is not watched
            self._count()
        if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
            return (args[0], self._and_begin(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._and_begin(kwargs["closure"])}
        self._begin()
        return args, kwargs

    def _and_begin(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_and_begin() -> Any:
            loss = closure()
            with torch.no_grad():
                self._begin()
            return loss

        return closure_and_begin

    def _begin(self) -> None:
        on_begin = self._on_begin()
        if on_begin is not None:
            on_begin()
        self._call(self._algorithm.before_step)

    def _ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self._stepping is None or self._stepping() is not optimizer:
            return
        if self._again:
            self._again -= 1
            return
        self._stepping = None
        watched = self._known(optimizer)
        assert watched is not None
        late = watched.idle and self._comes_late(watched)
        watched.idle = False
        if late:
            self._count()
            return
        if not self._order:
            self._begun_at = self._backwards()
        watched.stepped = True
        self._order.append(watched)
        if all(each.stepped or each.idle for each in self._watched):
            if not any(each.idle for each in self._watched):
                self._usual = self._backwards() - self._begun_at
                for place, each in enumerate(self._order):
                    each.place = place
            self._count()

    def _backwards(self) -> int:
        backwards = self._ended_backwards()
        return backwards() if backwards is not None else 0

    def _has_passed(self) -> bool:
        """Whether more backwards have ended since this round's first step than lie between the steps of a round."""
        return (
            bool(self._order) and self._usual is not None and self._backwards() - self._begun_at > self._usual
        )

    def _comes_late(self, watched: _Watched) -> bool:
        """Whether the step of one that was idle comes after the round that has ended, and not in the next one."""
        if self._order:
            return False
        others = [each.place for each in self._watched if each is not watched and not each.idle]
        no_backward = self._backwards() == self._ended_at
        was_last = watched.place is not None and all(
            place is not None and place < watched.place for place in others
        )
        return bool(others) and (no_backward or was_last)

    def _count(self) -> None:
        self._ended_at = self._backwards()
        self._order.clear()
        for each in self._watched:
            each.stepped = False
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


_wrapper = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
_lock = threading.Lock()
# In the order in which they were made, which is that of the other ranks too: their algorithms may communicate.
_counters: "weakref.WeakValueDictionary[int, StepCounter]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


@functools.cache
def _hook_all_optimizers() -> None:
    register_optimizer_step_pre_hook(_step_begins)
    register_optimizer_step_post_hook(_step_ended)


def _every_counter() -> list[StepCounter]:
    with _lock:
        return list(_counters.values())


def _step_begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    for counter in _every_counter():
        args, kwargs = counter._begins(optimizer, args, kwargs)
    return args, kwargs


def _step_ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for counter in _every_counter():
        counter._ended(optimizer)


def _running_steps(optimizer: torch.optim.Optimizer) -> int:
    """How many calls of an optimizer's step() are on the stack: of torch's wrapper, which calls the hooks."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _wrapper and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back
    return found


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
