"""Uneven inputs: a rank that is out of batches takes part in the backwards of the others, until all ranks are out.

The native part acts inside a backward (csrc/engine/ending/join.h). This module has the context around a training loop,
and the hook by which torch's own Join does the same for several objects. Every engine has one UnevenInputs.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch.distributed.algorithms import Joinable, JoinHook

from gossamer import _C
from gossamer.comm import gather_numbers
from gossamer.engine.agree import broadcast_buffers, broadcast_everywhere, require_equal
from gossamer.engine.optimizer_state import CannotCopyError, copy_state
from gossamer.engine.parts import Parts
from gossamer.engine.steps import StepCounter
from gossamer.engine.worker import weak_call
from gossamer.errors import ConfigError


class UnevenInputs:
    """Joins the training loops of the ranks of one engine. It holds parts of the engine, and not the engine itself.

    Attributes:
        sync_buffers: in a join, all ranks follow the buffers of one that has batches.
        copies_buffers: a join with sync_buffers is under way.
        of_elastic_run: gs.elastic() may replace the engine, and a join does not outlive it.
    """

    def __init__(self, native: _C.Engine, parts: Parts, steps: StepCounter) -> None:
        self._native, self._steps, self._algorithm, self._members = (
            native,
            steps,
            parts.algorithm,
            parts.members,
        )
        self._comm, self._control = parts.comm, parts.control
        self.sync_buffers = False
        self.copies_buffers: bool = False
        self.of_elastic_run: bool = False
        self._shadowing = False

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return self._comm.device

    @contextlib.contextmanager
    def context(
        self, *, divide_by_initial_world_size: bool, throw_on_early_termination: bool
    ) -> Iterator[None]:
        """Surround one training loop on every rank. See Face.join(), also for the errors.

        Every error stops the engine, but for those of begin() and the RuntimeError of an early termination.
        """
        self.begin(
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )
        with self._all_or_none():
            yield
            is_last = True
            while self.shadow():
                is_last = False
            self.end(is_last=is_last)

    def begin(
        self,
        *,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool = False,
        on_begin: Callable[[], bool] | None = None,
    ) -> None:
        """Let the backwards from now on allow for ranks that shadow them. Collective.

        Args:
            on_begin: called at the beginning of each synchronised backward of this rank. If it returns False, this
                rank has left the context, and all ranks leave with this backward.

        Raises:
            ConfigError: on every rank. The arguments differ between ranks, the algorithm needs every rank, or the run
                is elastic.
        """
        if not self._algorithm.uneven_inputs:
            raise ConfigError(
                f"join: {self._algorithm!r} needs every rank in every step; give all ranks equally many batches, by a "
                f"DistributedSampler or drop_last=True, or train by gradient_allreduce or bytegrad"
            )
        if self.of_elastic_run:
            raise ConfigError(
                "join: not in a run of gs.elastic(), whose sampler gives all ranks equally many batches; remove join()"
            )
        self._native.worker.check_alive()
        self._native.abandon()
        self._native.worker.wait()
        settings = (
            f"divide_by_initial_world_size {divide_by_initial_world_size}, "
            f"throw_on_early_termination {throw_on_early_termination}"
        )
        require_equal(self._control, [settings], "the setting of join")
        # An algorithm that sums divides by nothing.
        mean_of_active = not divide_by_initial_world_size and self._algorithm.average
        if self.sync_buffers:
            broadcast_buffers(self._members, self._comm, self._control, source=0)
            self.copies_buffers = True
            self._native.lockstep.set_on_end(weak_call(weakref.WeakMethod(self._follow_buffers)))
        self._native.join.start(mean_of_active, throw_on_early_termination, on_begin)

    def shadow(self) -> bool:
        """Take part in the next synchronised backward of the ranks that have batches.

        Return False, and send nothing, if no rank has a batch.

        Raises:
            CommError: another rank has failed. This engine has stopped.
        """
        with self._all_or_none():
            self._native.worker.check_alive()
            self._native.abandon()
            self._native.hooks.survey()
            self._shadowing = True
            try:
                return self._native.shadow()
            finally:
                self._shadowing = False

    def end(self, *, is_last: bool) -> None:
        """Copy weights, buffers, optimizer states and the number of steps from one rank to all. Collective.

        Args:
            is_last: this rank has shadowed no backward of another rank. The source is such a rank, with the most steps.
        """
        with self._all_or_none():
            self._native.worker.wait()
            self._end_join()
            ranks = gather_numbers(self._control, int(is_last), self._steps.count, self._control.rank)
            _last, steps, source = max(ranks)
            params = [param for _, param in self._members.parameters()]
            buffers = self._members.movable_buffers()
            with torch.no_grad():
                broadcast_everywhere(self._comm, self._control, [*params, *buffers], source)
            even = all(last for last, *_ in ranks)  # no rank has shadowed another
            for optimizer in [] if even else self._steps.optimizers:
                if not isinstance(optimizer, Joinable):  # sharded over the ranks; joins by itself
                    ignored = {id(param) for param in self._members.ignored_parameters()}
                    copy_state(self._control, optimizer, source, ignored=ignored)
            self._steps.count = steps
            self._native.lockstep.optimizer_steps = steps
            if not is_last:
                for param in params:
                    param.grad = None  # it belongs to a step that this rank has not taken

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """End the join and the engine if the body raises: an exception on one rank would leave the others waiting."""
        try:
            yield
        except BaseException as error:
            if not self._native.join.ended_early:
                on_this_rank = not isinstance(error, CannotCopyError)
                self._native.worker.give_up(f"join was left by {error!r}", announce=on_this_rank)
            self._end_join()
            raise

    def _follow_buffers(self) -> None:
        """Copy the buffers of the last rank that had a batch. Called on every rank at the end of a backward."""
        with_batch = gather_numbers(self._control, -1 if self._shadowing else self._control.rank)
        with torch.no_grad():
            broadcast_buffers(self._members, self._comm, self._control, source=max(with_batch)[0])

    def _end_join(self) -> None:
        self._native.join.end()
        if self.copies_buffers:
            self.copies_buffers = False
            self._native.lockstep.set_on_end(None)


class ShadowHook(JoinHook):
    """The hook that torch.distributed.algorithms.Join calls when this rank is out of batches.

    Args:
        notify: called at the beginning of each synchronised backward of this rank, until all ranks have left the Join.
    """

    def __init__(
        self, uneven: UnevenInputs, *, divide_by_initial_world_size: bool, notify: Callable[[], None]
    ) -> None:
        self._uneven, self._notify, self._divide = uneven, notify, divide_by_initial_world_size
        self._raised = False

    def begin(self) -> None:
        """Begin the join. Collective. Raises what UnevenInputs.begin() raises."""
        this, notify = weakref.ref(self), self._notify

        def on_begin() -> bool:
            # A Join does not tell its hooks about an exception. An early termination on one rank comes through here.
            hook = this()
            try:
                notify()
            except BaseException:
                if hook is not None:
                    hook._raised = True
                raise
            return hook is not None and not hook._raised

        self._uneven.begin(divide_by_initial_world_size=self._divide, on_begin=on_begin)

    def main_hook(self) -> None:
        """Take part in one backward of the other ranks."""
        self._uneven.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the join, when all ranks are out of batches."""
        self._uneven.end(is_last=is_last_joiner)
