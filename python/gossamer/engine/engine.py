"""The engine of one model, as Python sees it: checks, plans and wires up the native engine.

The moments of a step are native (csrc/engine): counting gradients, firing buckets in order, the worker, the end
of backward. Here is what happens around it: at wrap, before a forward, and at close. Faces own one Engine.
"""

import atexit
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer import _C
from gossamer.comm import Communicator
from gossamer.engine.admission import describe, refusal_of
from gossamer.engine.agree import broadcast_tensors, require_equal
from gossamer.engine.plan import plan_buckets
from gossamer.errors import CodecError, CommError, ConfigError, GossamerError

_log = logging.getLogger("gossamer")
_open_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class Moments(Protocol):
    """What the engine asks of an algorithm (gossamer.algorithms.Algorithm)."""

    def block(self) -> int: ...
    def alignment(self, comm: Communicator) -> int: ...
    def setup(self, comm: Communicator, buckets: list[Any]) -> None: ...
    def native_work(self) -> Any: ...
    def before_forward(self, step: int) -> None: ...
    def bucket_ready(self, bucket: Any) -> None: ...
    def after_step(self, step: int) -> None: ...


class Engine:
    """One model, one algorithm, one group.

    Args:
        module: the model; its parameters are those that exist now.
        algorithm: what is done with a bucket of gradients.
        comm: the group, for tensors on the model's device.
        control: the same ranks for CPU tensors; `comm` itself where the model is on the CPU.
        bucket_bytes, first_bucket_bytes: see plan_buckets.
        broadcast: copy parameters and buffers from rank 0 now.

    Raises:
        ConfigError: on every rank, if the model, the algorithm or the bucket sizes differ between ranks; if a
            parameter cannot be trained this way; if the model is wrapped already.
    """

    def __init__(
        self,
        module: nn.Module,
        algorithm: Moments,
        *,
        comm: Communicator,
        control: Communicator,
        bucket_bytes: int,
        first_bucket_bytes: int,
        broadcast: bool = True,
    ) -> None:
        named = dict(module.named_parameters())
        self._names, self._params = list(named), list(named.values())
        trainable = [i for i, param in enumerate(self._params) if param.requires_grad]
        self._comm, self._control, self.algorithm = comm, control, algorithm
        self._bucket_bytes, self._first_bucket_bytes = bucket_bytes, first_bucket_bytes
        self._optimizer_hook: Any = None
        self.optimizer_steps = 0
        refusal = refusal_of(module, comm, [(other._comm, other._params) for other in _open_engines])
        settings = (
            f"algorithm {algorithm!r}, bucket_bytes {bucket_bytes}, first_bucket_bytes {first_bucket_bytes}"
        )
        verdict = f"refused: {refusal}" if refusal else "accepted"
        require_equal(control, [settings, verdict, *describe(module)], "the model")
        if refusal:
            raise refusal
        if broadcast:
            self._broadcast([*self._params, *module.buffers()])

        self.buckets: list[Any] = []
        self._native = self._build_native()
        self._output_gradient = lambda _grad, native=self._native: native.output_gradient()
        self._install(trainable[::-1])
        _open_engines.add(self)

    # --- the moments of a step ---

    def before_forward(self, training: bool) -> None:
        """Called before each forward. Completes a backward that raised; notices parameters that changed."""
        if not torch.is_grad_enabled() or self._native.inside_backward:
            return
        self._native.check_alive()
        self._native.abandon()
        self._native.survey()
        if training:
            self.algorithm.before_forward(self.optimizer_steps)

    def after_forward(self, output: Any) -> Any:
        """Called with each forward's output, which is returned: its backward tells the engine that it begins."""
        if torch.is_grad_enabled():
            for tensor in _tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._output_gradient)
        return output

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts this optimizer's steps, and tells the algorithm of each."""
        engine = weakref.ref(self)

        def stepped(*_: Any) -> None:
            alive = engine()
            if alive is not None:
                alive.optimizer_steps += 1
                alive._native.set_optimizer_steps(alive.optimizer_steps)
                alive.algorithm.after_step(alive.optimizer_steps)

        self._optimizer_hook = optimizer.register_step_post_hook(stepped)

    def require_same_parameters(self, module: nn.Module) -> None:
        """ConfigError if the module holds other parameter objects than when it was wrapped: they have no hooks."""
        for name, known, param in zip(self._names, self._params, module.parameters(), strict=True):
            if param is not known:
                raise ConfigError(
                    f"engine: parameter '{name}' is another object than the one that was wrapped, and would train "
                    f"without the other ranks; load with assign=False, or close() and wrap the model again"
                )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward only accumulates; the next backward outside sends the sum."""
        before = self._native.sync
        self._native.sync = False
        try:
            yield
        finally:
            self._native.sync = before

    def close(self) -> None:
        """Removes the hooks and ends the worker. Gradients stay where they are. Idempotent."""
        self._native.close()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        _open_engines.discard(self)

    # --- facts ---

    @property
    def bytes_sent(self) -> int:
        """Payload bytes this rank has handed to other ranks for this model since it was wrapped."""
        return self._comm.bytes_sent + (self._control.bytes_sent if self._control is not self._comm else 0)

    @property
    def backward_count(self) -> int:
        """Synchronised backward passes that have ended; the `step` of error messages."""
        return self._native.step

    # --- wiring ---

    def _build_native(self) -> Any:
        work = self.algorithm.native_work()
        if work is None:
            work = _C.PythonWork(_bucket_ready_of(self.algorithm, self._comm))
        return _C.Engine(
            comm=self._comm,
            control=self._control,
            params=self._params,
            names=self._names,
            work=work,
            on_late=_weak_call(weakref.WeakMethod(self._append_late)),
            on_order=_weak_call(weakref.WeakMethod(self._install)),
        )

    def _install(self, order: list[int]) -> None:
        plan = self._plan(order)
        if [bucket.param_indices for bucket in self.buckets] == plan:
            return
        self._native.clear_buckets()
        self.buckets = []
        # One at a time: the old flat memory goes as the gradients in it move.
        for indices in plan:
            self._append(indices)
        self.algorithm.setup(self._comm, self.buckets)
        _log.info("rank %d: %d parameters in %s", self._comm.rank, len(order), self.buckets)

    def _plan(self, order: list[int]) -> list[list[int]]:
        return plan_buckets(
            self._params,
            order,
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._first_bucket_bytes,
        )

    def _append(self, indices: list[int]) -> None:
        params = [self._params[i] for i in indices]
        block, alignment = self.algorithm.block(), self.algorithm.alignment(self._comm)
        bucket = _C.Bucket(len(self.buckets), indices, params, block, alignment, self._comm)
        self.buckets = [*self.buckets, bucket]
        self._native.append_bucket(bucket)

    def _append_late(self) -> None:
        """Called on every rank at the end of a backward when some rank trains parameters outside the plan."""
        late = self._native.survey()
        lines = [f"{self._names[i]} is trainable now" for i in late]
        require_equal(self._control, lines, "the set of parameters that became trainable")
        for indices in self._plan(late[::-1]):
            self._append(indices)
        self.algorithm.setup(self._comm, self.buckets)

    def _broadcast(self, tensors: list[Tensor]) -> None:
        on_device = [tensor for tensor in tensors if tensor.device.type == self._comm.device.type]
        elsewhere = [tensor for tensor in tensors if tensor.device.type != self._comm.device.type]
        broadcast_tensors(self._comm, on_device)
        broadcast_tensors(self._control, elsewhere)


def _tensors_in(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _bucket_ready_of(algorithm: Moments, comm: Communicator) -> Any:
    # Holds no engine: the worker thread must never be the one to drop the last reference to its own.
    def call(bucket: Any) -> None:
        try:
            algorithm.bucket_ready(bucket)
        except Exception as error:
            known = (ConfigError, CodecError, CommError)
            kind = next((each for each in known if isinstance(error, each)), GossamerError)
            place = f"rank {comm.rank}/{comm.size} step {bucket.step} {bucket!r}"
            raise kind(f"{place}: {algorithm!r}.bucket_ready raised {error!r}") from error

    return call


def _weak_call(method: "weakref.WeakMethod[Any]") -> Any:
    # The native engine must not keep its owner alive, or neither would ever be freed.
    def call(*args: Any) -> None:
        bound = method()
        if bound is not None:
            bound(*args)

    return call


@atexit.register
def _close_all() -> None:
    # Before the interpreter ends: a worker that runs Python must not outlive it.
    for engine in list(_open_engines):
        engine.close()
