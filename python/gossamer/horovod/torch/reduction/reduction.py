"""``Reduction``: the gradients of one DistributedOptimizer, from its first step to the end of the session.

The first synchronize() chooses one of two ways, the same on all ranks: Gossamer's engine, or named operations.
"""

import contextlib
import gc
import itertools
import logging
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator

from gossamer import _C, config
from gossamer.engine import claimants
from gossamer.errors import ConfigError
from gossamer.horovod.common import basics
from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.compression import GossamerCompressor
from gossamer.horovod.torch.operations.joining import during_join
from gossamer.horovod.torch.reduction.engine import EngineReduction, refusal_of
from gossamer.horovod.torch.reduction.negotiated import NegotiatedReduction
from gossamer.horovod.torch.reduction.passes import Passes
from gossamer.horovod.torch.reduction.request import Request, agree

_log = logging.getLogger("gossamer")
_live: "weakref.WeakSet[Reduction]" = weakref.WeakSet()
# The optimizers of a session are numbered in the order of their first steps. Each process set counts for itself, since
# only its ranks take the same steps.
_numbers: dict[int | None, Iterator[int]] = defaultdict(itertools.count)


class Reduction(Passes):
    """Reduces the gradients of a request once a step. Does nothing if no other rank takes part."""

    def __init__(self, request: Request, passes: int) -> None:
        super().__init__(request, passes)
        self._number: int | None = None
        self._way: EngineReduction | NegotiatedReduction | None = None
        self.why: str = "the first synchronize() chooses"
        _live.add(self)

    @property
    def active(self) -> bool:
        """Whether other ranks take part, or may do so later: in elastic training one process counts too."""
        process_set = self.request.process_set
        if process_set.included() is None:
            process_set.native()  # raises an error that says what is missing
        size = process_set.size()
        if not process_set.included() or size is None:
            return False
        return size > 1 or config.variables("HOROVOD_").get("HOROVOD_ELASTIC", "0") not in ("", "0")

    @property
    def _engine(self) -> EngineReduction | None:
        return self._way if isinstance(self._way, EngineReduction) else None

    @property
    def way(self) -> str:
        """The way that was chosen: "engine", "negotiated" or, before the choice, "undecided"."""
        return "undecided" if self._way is None else "engine" if self._engine else "negotiated"

    @property
    def buckets(self) -> list[_C.Bucket]:  # type: ignore[override]
        """The engine's buckets; empty without the engine."""
        return self._engine.buckets if self._engine else []

    @property
    def under_way(self) -> bool:
        """Whether gradients of this step may be travelling."""
        return self._engine.under_way if self._engine else super().under_way

    def set_passes(self, passes: int) -> None:
        """Lets every parameter wait for so many gradients from now on."""
        super().set_passes(passes)
        if self._engine:
            self._engine.set_passes(passes)

    def synchronize(self) -> None:
        """Waits until every parameter has the reduced gradient.

        Raises:
            ConfigError: on every rank, in the first step, if the ranks were asked for different things; or if a
                Reduction that was made later has some of the parameters.
            HorovodInternalError: on every rank, if a reduction failed.
        """
        if not self.active:
            return
        self.require_own()
        if not self._engine:
            self.install()
        try:
            (self._way or self._choose()).synchronize()
        finally:
            self.reset()

    def abandon(self) -> None:
        """Completes a step that has begun, so that no rank waits for this one. The optimizer gets another state."""
        self.reset()
        try:
            if self._way is not None:
                self._way.abandon()
        except HorovodInternalError as error:
            _log.debug("gossamer: the gradients under way were lost: %s", error)

    def close(self, *, crashed: bool = False) -> None:
        """Ends the way that was chosen; the next synchronize() chooses again.

        Args:
            crashed: whether this rank has failed, so that ranks that wait for it get an error.
        """
        if self._way is not None:
            self._way.close(crashed=crashed)
            self.install()
        self._way, self._number = None, None
        self.reset()

    def retire(self) -> None:
        """Ends this Reduction, which another one replaces."""
        self.close()
        self.remove()

    def shadow(self) -> None:
        """Takes part in the other ranks' steps, while this rank is in join(), until all have joined."""
        if self._engine:
            self._engine.shadow()

    def completed(self, index: int) -> None:
        """Lets the gradient travel in the backward, where the way does that."""
        if isinstance(self._way, NegotiatedReduction):
            self._way.completed(index)

    def _choose(self) -> EngineReduction | NegotiatedReduction:
        request = self.request
        if self._number is None:
            self._number = next(_numbers[request.process_set.process_set_id])
        refusal = refusal_of(request)
        all_here, sparse = agree(request, self._number, refusal)
        if sparse:
            refusal = refusal or "a gradient is sparse"
        if not all_here:
            # A rank in join() can answer allreduces, but choose nothing. So this step is negotiated, and the next one
            # chooses.
            refusal = refusal or "a rank has joined before the first step"
        if refusal and isinstance(request.compression, GossamerCompressor):
            raise ConfigError(f"hvd.DistributedOptimizer: {request.compression!r} cannot be used: {refusal}")
        way: EngineReduction | NegotiatedReduction
        if refusal:
            way = NegotiatedReduction(request, self._number, sparse=sparse, early=all_here)
        else:
            claimants.discard(self)  # else the engine, which is this one's, would end it
            try:
                way = EngineReduction(request, self._number, passes=self.passes, order=list(self.complete))
            finally:
                claimants.add(self)
            self.remove()  # the engine counts natively
        if all_here:
            self._way = way
            self.why = refusal or "all gradients are dense and summed alike"
            _log.info(
                "rank %d: DistributedOptimizer %d is %s: %s", basics.rank(), self._number, self.way, self.why
            )
        return way


@basics.at_shutdown
def _close_all() -> None:
    # After an exception on this rank alone, the others may wait for it in a step.
    crashed = sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
    for reduction in list(_live):
        reduction.close(crashed=crashed)
    _numbers.clear()


def _on_engine(process_set: ProcessSet) -> list[Reduction]:
    """Returns the Reductions on the engine that a join of this set concerns."""
    every = process_set is global_process_set
    return [each for each in _live if each._engine and (every or each.request.process_set is process_set)]


@during_join
@contextlib.contextmanager
def shadowing(process_set: ProcessSet) -> Iterator[None]:
    """Adds zeros, while this rank is in join(), to what the engines of its optimizers reduce over this set.

    If the set is that of all ranks, it does so over every set.

    Raises:
        HorovodInternalError: at the end, if one of the reductions failed.
    """
    failures: list[BaseException] = []

    def shadow(reduction: Reduction) -> None:
        try:
            reduction.shadow()
        except BaseException as error:  # raised below, in the thread that joined
            failures.append(error)

    # An optimizer that the script has dropped must not take part, on any rank, even if the garbage collector has not
    # come by. A collection takes a tenth of a second, so it is made only where an engine would wait.
    if _on_engine(process_set):
        gc.collect()
    threads = [threading.Thread(target=shadow, args=(each,), daemon=True) for each in _on_engine(process_set)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()
    if failures:
        raise HorovodInternalError(f"hvd.join: {failures[0]}") from failures[0]
