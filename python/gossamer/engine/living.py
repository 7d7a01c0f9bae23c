"""The engines of this process that have not ended, and what becomes of them when a model is wrapped again.

A parameter has at most one living engine; csrc/engine/owners.h knows it. A model that is wrapped again is taken over
from the wrapper before, whether that one is in use, or waits for the garbage collector, which comes at another time on
each rank. So all ranks do the same.
"""

import atexit
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from gossamer import _C
from gossamer.engine.admission import Members, Wrapped, refusal_of
from gossamer.errors import ConfigError
from gossamer.observe.report import Reports

if TYPE_CHECKING:
    from gossamer.comm import Communicator
    from gossamer.engine.algorithm import Algorithm
    from gossamer.engine.engine import Engine

_log = logging.getLogger("gossamer")
_REPLACED = "this wrapper has ended: its model was wrapped again; use the wrapper that was made last"
living: "weakref.WeakSet[Engine]" = weakref.WeakSet()
"""An engine adds itself, and goes when it ends."""


class Claimant(Protocol):
    """What combines gradients of parameters, or steps, and ends as soon as something else is made for one of them."""

    @property
    def params(self) -> Sequence[torch.Tensor]: ...
    def leave(self) -> None:
        """End it: something that was made later has some of the parameters. Waits for no other rank."""


claimants: "weakref.WeakSet[Claimant]" = weakref.WeakSet()
"""Each adds itself, and goes when it ends; take_over() ends it too."""


def refusal_to_wrap(members: Members, comm: "Communicator", algorithm: "Algorithm") -> ConfigError | None:
    """Return why this rank cannot train this model over `comm`; None if it can."""
    refusal = refusal_of(members, comm, algorithm, _wrapped(members))
    if refusal is not None:
        gc.collect()  # a wrapper that nothing refers to is no reason
        refusal = refusal_of(members, comm, algorithm, _wrapped(members))
    return refusal


def take_over(params: Sequence[torch.Tensor]) -> None:
    """End what trains these parameters, but engines that train others too. Waits for no other rank."""
    own = {id(param) for param in params}
    for claimant in list(claimants):
        if not own.isdisjoint(map(id, claimant.params)):
            claimant.leave()
    for native, engine in _owners_of(params):
        if engine is None:
            native.close(_REPLACED)
        elif own.issuperset(map(id, engine.planned.values())):
            engine.leave(_REPLACED)


def require_untrained(params: Sequence[torch.Tensor], what: str) -> None:
    """Raise ConfigError if an engine that take_over() has left, which has other parameters too, trains some of these.

    On this rank alone: for what is made without a collective. `what` begins the message.
    """
    if not _C.owners_of([*params]):
        return
    gc.collect()  # a wrapper that nothing refers to is no reason
    own = {id(param) for param in params}
    for _, engine in _owners_of(params):
        for name, param in engine.planned.items() if engine else ():
            if id(param) not in own:
                raise ConfigError(
                    f"{what}: its parameters belong to a model that is wrapped already, together with '{name}', which "
                    f"it does not have; close() that wrapper first"
                )


def begins_backward(engine: "Engine", params: Sequence[nn.Parameter]) -> Callable[[torch.Tensor], None]:
    """Return a hook for outputs of a forward, which tells the engine that their backward begins.

    The graph, which holds the hook, may live longer than the engine. The hook keeps neither it nor parameters alive.
    """
    alive, weak = weakref.ref(engine), [*map(weakref.ref, params)]

    def hook(_grad: torch.Tensor) -> None:
        if (engine := alive()) is not None and engine.is_open:
            engine.native.output_gradient()
        elif _C.inside_backward_of_all():
            known = [param for each in weak if (param := each()) is not None]
            if not _C.owners_of(known):  # else another wrapper has them now, and averages their gradients
                raise ConfigError(
                    "engine: the wrapper whose forward made this graph was closed or deleted before its backward, so "
                    "the gradients would be this rank's alone; keep the wrapper as long as its outputs, or call the "
                    "model itself"
                )

    return hook


def _owners_of(params: Iterable[torch.Tensor]) -> "list[tuple[_C.Engine, Engine | None]]":
    """Return the engines that train some of these parameters, of those that are trained now. None: it is deleted."""
    natives, engines = _C.owners_of([param for param in params if param.requires_grad]), list(living)
    return [(native, next((each for each in engines if each.native is native), None)) for native in natives]


def _wrapped(members: Members) -> list[Wrapped]:
    owners = [engine for _, engine in _owners_of(param for _, param in members.parameters())]
    return [
        Wrapped(each.comm, each.algorithm, each.planned, replaced=each in owners) for each in list(living)
    ]


def count(samples: float) -> None:
    """Say for all models that this process has wrapped how many samples this rank's next gradients are of.

    See DataParallel.count().
    """
    for engine in list(living):
        engine.count(samples)


def report_all(*, reset: bool = False, codec_error: bool = False) -> Reports:
    """Return the reports of all models that this process has wrapped and not closed, in the order of wrapping.

    Args:
        reset, codec_error: see DataParallel.report().
    """
    engines = sorted(living, key=lambda engine: engine.native.recorder.number)
    return Reports(engine.report(reset=reset, codec_error=codec_error) for engine in engines)


def weights_in_buckets() -> set[int]:
    """Return the ids of the parameters whose weights lie in a bucket. An algorithm loses them if they move."""
    working = [engine for engine in living if "weight" in engine.algorithm.fields]
    return {id(param) for engine in working for param in engine.params.values()}


@atexit.register
def _close_all() -> None:
    # A worker that runs Python must not outlive the interpreter.
    crashed = getattr(sys, "last_value", None) is not None
    for engine in list(living):
        try:
            engine.close(crashed=crashed)
        except Exception:
            _log.exception("gossamer: a wrapper could not be closed")
