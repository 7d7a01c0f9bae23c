"""The engine of one model: it checks the model, plans its buckets, and drives the native engine.

The native engine (csrc/engine) counts gradients, sends buckets in order, runs the worker and ends a backward. This
module does what happens around that: when a model is wrapped, before a forward, and at close. A face owns one Engine.
"""

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gossamer import _C
from gossamer.autotune import Autotune, Tuned, Tuner, refusal_of_tuning
from gossamer.comm import Communicator, gather_numbers
from gossamer.engine.admission import Members, tensors_in
from gossamer.engine.agree import (
    broadcast_buffers,
    broadcast_everywhere,
    has_mean,
    make_equal,
    mean_everywhere,
    require_same_model,
)
from gossamer.engine.algorithm import Algorithm
from gossamer.engine.buckets import Buckets
from gossamer.engine.compiling import uncompiled
from gossamer.engine.graph import Graph
from gossamer.engine.join import UnevenInputs
from gossamer.engine.living import begins_backward, living, refusal_to_wrap, take_over
from gossamer.engine.merging import merge_states
from gossamer.engine.parts import Parts
from gossamer.engine.plan import Sizes
from gossamer.engine.reporting import Figures
from gossamer.engine.state import Fields, require_state, restore_fields, save_fields
from gossamer.engine.steps import StepCounter
from gossamer.engine.survival import Own, own_of
from gossamer.engine.worker import Worker, weak_call
from gossamer.errors import ConfigError
from gossamer.observe.report import Report
from gossamer.observe.stall import Limits
from gossamer.observe.timeline import begin_from_environment
from gossamer.torch_private import outside_transforms


class Engine:
    """Trains one model with one algorithm over one group. Making one is collective.

    Args:
        module: the model. Parameters that it gets later are not trained.
        algorithm: what to do with a bucket.
        comm: the group, for tensors on the model's device.
        control: the same ranks for CPU tensors; `comm` itself where the model is on the CPU.
        bucket_bytes, first_bucket_bytes: see plan_buckets.
        last: names of parameters that travel after all others.
        broadcast: copy parameters and buffers from rank 0 now.
        buffers_too: False: copy no buffers.
        ignore: names of parameters and buffers that belong to each rank alone. They are not copied, planned, sent or
            compared.
        autotune: what to try in the first steps; None: nothing.
        stall: when a wait is logged and when it ends; None: as gossamer.config says.

    Raises:
        ConfigError: on every rank. The model, the algorithm or the bucket sizes differ between ranks, a parameter
            cannot be trained by the engine, or the model is wrapped already.
    """

    def __init__(
        self,
        module: nn.Module,
        algorithm: Algorithm,
        *,
        comm: Communicator,
        control: Communicator,
        bucket_bytes: int,
        first_bucket_bytes: int | Sequence[int],
        last: Collection[str] = (),
        broadcast: bool = True,
        buffers_too: bool = True,
        ignore: Collection[str] = (),
        autotune: Autotune | None = None,
        stall: Limits | None = None,
    ) -> None:
        self._members = Members(module, ignore)
        named = dict(self._members.parameters())
        self._names, self._params = list(named), list(named.values())
        trainable = [i for i, param in enumerate(self._params) if param.requires_grad]
        self._comm, self._control = comm, control
        self.algorithm: Algorithm = algorithm
        parts = Parts(algorithm, self._members, named, comm, control)
        self._buckets = Buckets(parts, Sizes(bucket_bytes, first_bucket_bytes, last))
        self._steps = StepCounter(
            algorithm, self._params, self._buckets.adopt_weights, self._count_step, self._backwards
        )
        refusal = refusal_to_wrap(self._members, comm, algorithm) or refusal_of_tuning(autotune, algorithm)
        settings = (
            f"algorithm {algorithm!r}, bucket_bytes {bucket_bytes}, first_bucket_bytes {first_bucket_bytes}, "
            f"last {sorted(last)}, autotune {autotune!r}"
        )
        require_same_model(control, self._members, settings, refusal)
        copied = [*self._params, *(self.buffers if buffers_too else [])] if broadcast else None
        take_over(self._params)
        if copied is not None:
            make_equal(comm, control, copied)

        self._survives = False  # see survive()
        self.has_counted: bool = False  # by count()
        self.native: _C.Engine = _C.Engine(
            comm=comm,
            control=control,
            params=self._params,
            names=self._names,
            on_late=weak_call(weakref.WeakMethod(self._buckets.append_late)),
            on_order=weak_call(weakref.WeakMethod(self._buckets.arrive)),
        )
        try:
            self._begin(parts, trainable, autotune, stall)
        except BaseException:  # a traceback may keep the native engine alive
            self.native.close()
            raise

    def _begin(
        self, parts: Parts, trainable: list[int], autotune: Autotune | None, stall: Limits | None
    ) -> None:
        algorithm, comm = self.algorithm, self._comm
        self._buckets.native = self.native
        self._worker = Worker(self.native, comm)
        self.uneven: UnevenInputs = UnevenInputs(self.native, parts, self._steps)
        algorithm.connect(self._worker)
        if algorithm.follows_gradients:
            # The native engine is no part of Python's garbage collection, so it must not hold the algorithm.
            ready = weak_call(weakref.WeakMethod(algorithm.gradient_ready))
            ended = weak_call(weakref.WeakMethod(algorithm.after_backward))
            named_params = list(parts.named.items())
            self.native.alone.set_listener(
                lambda index: ready(*named_params[index]),
                lambda missing: ended([named_params[index] for index in missing]),
            )
        self.graph: Graph = Graph(self.native, parts, self._buckets)
        self._output_gradient = begins_backward(self, self._params)
        if type(algorithm).before_backward is not Algorithm.before_backward:
            self.native.set_on_begin(weak_call(weakref.WeakMethod(self._begin_backward)))
        self._choose_ending()
        self._choices = algorithm.codec_choices(autotune.codecs if autotune else ())
        self._buckets.arrive(trainable[::-1])
        if algorithm._background is not None:
            self.native.worker.fails_with(algorithm._background.comm)
        done = weak_call(weakref.WeakMethod(self._end_tuning))
        choices = self._choices, self._buckets, algorithm
        self._tuner = Tuner(autotune, *choices, control=self._control, done=done) if autotune else None
        self._begin_tuning()
        self._figures = Figures(self.native, parts, self._buckets)
        begin_from_environment()
        self._watch = self._buckets.open_watch(stall)
        self._process = os.getpid()
        living.add(self)

    # --- the moments of a step ---

    @uncompiled
    def before_forward(self, copy_buffers: Callable[[], None] = lambda: None) -> None:
        """Prepare for a forward. Complete a backward that raised, and notice parameters that changed.

        Args:
            copy_buffers: a collective of the face. What the algorithm then submits travels beside the forward.
        """
        with outside_transforms():  # of torch.func, in which the engine's own tensors would be wrapped
            if not torch.is_grad_enabled() or _C.inside_backward():
                copy_buffers()
                return
            self._watch.begin()
            native = self.native
            native.worker.check_alive()
            native.abandon()
            self.graph.begin_forward(self.algorithm.lockstep)
            native.hooks.survey()
            native.check_capture()
            self._buckets.adopt_weights()
            self._choose_ending()
            copy_buffers()
            if self._members.training:
                self.algorithm.before_forward(self.optimizer_steps)

    def _begin_backward(self) -> None:
        self._buckets.adopt_weights()
        self.algorithm.before_backward(self.optimizer_steps)

    def _choose_ending(self) -> None:
        native = self.native
        native.end_by(native.lockstep if self.algorithm.lockstep else native.alone)

    @uncompiled
    def after_forward(self, output: Any) -> Any:
        """Hook the output of a forward, so that its backward tells the engine when it begins. Return the output.

        A leaf has no backward of its own, and would keep the hooks of all forwards.
        """
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._output_gradient)
        return output

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Count a step whenever all of these optimizers have stepped. Tell the algorithm before and after it."""
        self._steps.watch(optimizers)

    def _count_step(self, steps: int) -> None:
        self.native.lockstep.optimizer_steps = steps
        self._choose_ending()
        self._buckets.adopt_weights()

    def _backwards(self) -> int:
        return self.backward_count

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps so far, equal on all ranks."""
        return self._steps.count

    def broadcast(self) -> None:
        """Copies rank 0's parameters, and buffers, to the other ranks, in place. Collective.

        Nothing may be submitted, because all use the same connections.
        """
        broadcast_everywhere(self._comm, self._control, [*self._params, *self.buffers])

    def consensus(self) -> None:
        """Replace parameters and buffers by their exact mean over the ranks, in place. Collective.

        Integers and float8 stay: they are frozen. Weights that the script has put in for a while, and will take out
        again, are no concern of the algorithm's.
        """
        self.native.worker.check_alive()
        self.native.worker.wait()
        with self._watch.waiting("consensus"):
            held = any(bucket.weights_held() for bucket in self.buckets)
            for_a_while = any(each for [each] in gather_numbers(self._control, int(held)))
            if not for_a_while:
                self.algorithm.settle()
                self._buckets.adopt_weights()
            mean_everywhere(self._comm, self._control, filter(has_mean, [*self._params, *self.buffers]))
        if not for_a_while:
            self.algorithm.after_consensus()

    def require_same_parameters(self, module: nn.Module) -> None:
        """Raise ConfigError if the module holds other parameter objects than when it was wrapped."""
        self._members.require_same(self._params, module)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate gradients without sending them. The next backward outside sends the sum."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @property
    def sync(self) -> bool:
        """Whether the backwards that begin from now on communicate."""
        return self.native.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self.native.sync = sync

    def sync_buffers(self, by: Callable[[], None] | None = None) -> None:
        """Copy rank 0's buffers before a forward, or call `by` instead. Collective.

        Do nothing in a join, which copies buffers after each backward, or in a forward that backward computes again.
        """
        if not self.uneven.copies_buffers and not _C.inside_backward():
            self.native.worker.wait()  # whose operations use the same connections
            with self._watch.waiting("the buffers of rank 0"):
                (by or partial(broadcast_buffers, self._members, self._comm, self._control, source=0))()

    def count(self, samples: float) -> None:
        """See Face.count()."""
        if not isinstance(samples, (int, float)) or not 0 <= samples < math.inf:
            raise ConfigError(f"count: samples must be a finite number of at least 0, got {samples!r}")
        if self._survives and self.algorithm.weighs_gradients:
            raise ConfigError(
                f"count: a model under gs.elastic() cannot weight its gradients, got {samples!r}; a step that is sent "
                f"again would have no counts"
            )
        self.has_counted = True
        if self.algorithm.weighs_gradients and self.algorithm.average:
            self.native.join.count(samples)
        else:
            self.algorithm.count(samples)

    def close(self, *, crashed: bool = False) -> None:
        """Remove the hooks and end the worker. Gradients stay as they are. Idempotent.

        Args:
            crashed: do not serve the other ranks any more. Those that wait for this rank get an error soon.
        """
        if crashed:
            for comm in (self._comm, self._control):
                comm.announce_failure()
        self._end("")
        self.algorithm.close(crashed=crashed)

    def _end(self, why: str) -> None:
        living.discard(self)
        self._watch.close()
        self.native.close(why)
        self._steps.close()

    def leave(self, why: str) -> None:
        """End as close() does, but wait for nobody: other ranks may train on. Errors of a later use say `why`."""
        self._end(why)
        self.algorithm.leave()

    def __del__(self) -> None:
        # A graph, or a thread for a moment, may keep the native engine alive: it must not train on. A forked child must
        # not take the locks that a thread of its parent may have held.
        if getattr(self, "_process", 0) == os.getpid() and not self.native.closed:
            self.leave("")

    @property
    def comm(self) -> Communicator:
        """The group, for tensors on the model's device."""
        return self._comm

    @property
    def planned(self) -> dict[str, torch.Tensor]:
        """The parameters of the buckets by name: those that the engine trains."""
        return {
            name: param for each in self.buckets for name, param in zip(each.names, each.params, strict=True)
        }

    @property
    def buckets(self) -> list[_C.Bucket]:
        """The buckets of the current plan, in the order in which they are sent."""
        return self._buckets.all

    @property
    def backward_count(self) -> int:
        """Synchronised backward passes that have ended; the `step` of error messages."""
        return self.native.step

    # --- figures ---

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent to other ranks for this model since it was wrapped."""
        return self._figures.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Payload bytes that this rank has received from other ranks for this model."""
        return self._figures.bytes_received

    @property
    def is_open(self) -> bool:
        """Whether the engine works: True until close()."""
        return not self.native.closed

    @property
    def activity(self) -> list[tuple[str, int, float]]:
        """What waits or runs now: (what, bucket or -1, since when in seconds of the Unix epoch)."""
        return self.native.activity()

    def report(self, *, reset: bool = False, codec_error: bool = False) -> Report:
        """Return the figures of this model's steps. See Face.report."""
        return self._figures.report(reset=reset, codec_error=codec_error)

    # --- what a resumed run needs ---

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume, beside model and optimizer. See Face.algorithm_state_dict."""
        self.native.worker.wait()
        own = self.algorithm.state_dict()  # before the fields: it waits until they are complete
        return {
            "optimizer_steps": self.optimizer_steps,
            "backward_count": self.backward_count,
            "plan": self._buckets.names,
            "tuned": self.tuned.saved() if self.tuned else None,
            "fields": save_fields(self.buckets, self.algorithm.state_fields),
            "algorithm": own,
            "saved_by": self.place,
        }

    def merged_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what this rank loads, from what state_dict() returned on every rank of another number of ranks.

        Raises:
            ConfigError: the states are not those of all ranks, or not of one step, or the algorithm cannot merge them.
        """
        return merge_states(states, self.algorithm, self._comm, self.place, self.params)

    @property
    def place(self) -> dict[str, int]:
        """This rank, the number of ranks, and that of the largest host if sums go by hosts (else 1)."""
        hosts = self._comm.hosts if isinstance(self._comm, _C.ByHosts) else [[0]]
        return {"rank": self._comm.rank, "size": self._comm.size, "largest_host": max(map(len, hosts))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what state_dict() returned on this rank, or merged_state(). Collective: all ranks load the same step."""
        self.native.worker.wait()
        self.algorithm.settle()
        apart = self.algorithm.independent
        require_state(self._control, state, self._names, self._choices, apart=apart)
        self._load_tuned(state["tuned"])
        self._buckets.load(state["plan"], rebuild=bool(self._choices) or self._tuner is not None)
        restore_fields(self.buckets, state["fields"])
        self._steps.count = state["optimizer_steps"]
        self.native.resume(state["backward_count"], state["optimizer_steps"])
        self.algorithm.load_state_dict(state["algorithm"])
        if state.get("saved_by", {}).get("merged"):
            self.algorithm.after_merge()

    # --- a group that loses members, and the next one ---

    def survive(self, on_lost: Callable[[bool, str], bool], on_end: Callable[[], None]) -> None:
        """Let this engine's group be replaced in the middle of a backward.

        Args:
            on_lost: see Lockstep.set_on_lost(). It may call own() and close(), and make another engine of the model.
            on_end: called at the end of each synchronised backward that has succeeded.
        """
        self._survives = self.uneven.of_elastic_run = True
        self.algorithm.survive_losses()
        self.native.flight.keep_for_redo(True)
        self.native.lockstep.set_on_lost(on_lost)
        self.native.lockstep.set_on_end(on_end)

    def forgive_in_steps(self, forgive: Callable[[RuntimeError], bool]) -> None:
        """Let optimizers step on after an error of the algorithm before or after a step, if `forgive` returns True."""
        self._steps.forgive = forgive

    def own(self, *, in_backward: bool) -> Own:
        """Return what this rank brings into the next group.

        Args:
            in_backward: a backward has failed, whose gradients are to be sent again.
        """
        return own_of(self.native, self._buckets, self.algorithm, self.counts, in_backward=in_backward)

    @property
    def counts(self) -> tuple[int, int]:
        """Backwards and optimizer steps that have ended; see resume_at()."""
        return self.backward_count, self.optimizer_steps

    @property
    def plan(self) -> list[list[str]]:
        """The names of the parameters of each bucket; see adopt()."""
        return self._buckets.names

    def defer_steps(self, pending: Sequence[int] = ()) -> list[int]:
        """Let the caller call the algorithm's after_step() for each step in the list that is returned.

        Args:
            pending: steps of another engine of this model for which it is still to be called.
        """
        self._survives = True
        self._steps.deferred = list(pending)
        return self._steps.deferred

    def adopt(self, plan: list[list[str]], fields: Fields, counts: tuple[int, int]) -> None:
        """Continue another engine of this model.

        Args:
            plan: the parameters of each bucket, equal on all ranks.
            fields: the algorithm's own.
            counts: see resume_at().
        """
        self._buckets.load(plan, rebuild=False)
        restore_fields(self.buckets, fields)
        self.resume_at(*counts)

    def resume_at(self, backwards: int, optimizer_steps: int) -> None:
        """Set the counters."""
        self._steps.count = optimizer_steps
        self.native.resume(backwards, optimizer_steps)

    def redo(self) -> None:
        """Send the gradients that the parameters have, as one backward."""
        self.native.redo()

    @property
    def wish(self) -> bool:
        """Whether this rank, or as of the last backward any rank, wishes for a change of the group."""
        return self.native.lockstep.wished

    @wish.setter
    def wish(self, wish: bool) -> None:
        self.native.lockstep.wish = wish

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters that the ranks share, by name."""
        return dict(zip(self._names, self._params, strict=True))

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that the ranks share, as admission.movable() gives them."""
        return self._members.movable_buffers()

    @property
    def is_tuning(self) -> bool:
        """Whether the model was wrapped with autotune."""
        return self._tuner is not None

    def lose_group(self) -> None:
        """End all waits for the other ranks of this group. Any thread may call it."""
        for comm in (self._comm, self._control):
            comm.announce_failure()
        self.algorithm.lose_group()

    def _load_tuned(self, tuned: dict[str, Any] | None) -> None:
        """Take what another run has tuned; measure anew if that run had not finished."""
        by_name = {repr(codec): codec for codec in self._choices}
        chosen = tuned["codecs"].items() if tuned else ()
        self.algorithm.use_codecs({name: by_name[codec] for name, codec in chosen})
        if tuned:
            self._buckets.bucket_bytes = tuned["bucket_bytes"]
            self._end_tuning(Tuned(tuned["bucket_bytes"], dict(tuned["codecs"])))
            return
        self._begin_tuning()

    def _begin_tuning(self) -> None:
        self.tuned: Tuned | None = None
        if self._tuner is not None:
            self._tuner.restart()
            self.native.lockstep.set_on_end(weak_call(weakref.WeakMethod(self._tuner.backward_ended)))

    def _end_tuning(self, tuned: Tuned) -> None:
        self.tuned = tuned
        self.native.lockstep.set_on_end(None)
