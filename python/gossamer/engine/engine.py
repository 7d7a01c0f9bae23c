"""The engine of one model, as Python sees it: checks, plans and wires up the native engine.

The moments of a step are native (csrc/engine): counting gradients, firing buckets in order, the worker, the end
of backward. Here is what happens around it: at wrap, before a forward, and at close. Faces own one Engine.
"""

import atexit
import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer import _C
from gossamer.comm import Communicator
from gossamer.engine.agree import broadcast_tensors, require_equal
from gossamer.engine.plan import plan_buckets
from gossamer.errors import CodecError, CommError, ConfigError, GossamerError

_log = logging.getLogger("gossamer")
_TRAINABLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
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
        self._refuse_unsupported(module)
        settings = (
            f"algorithm {algorithm!r}, bucket_bytes {bucket_bytes}, first_bucket_bytes {first_bucket_bytes}"
        )
        require_equal(control, [settings, *self._describe(), *_describe_buffers(module)], "the model")
        if broadcast:
            self._broadcast([*self._params, *module.buffers()])

        self.buckets: list[Any] = []
        self._native = self._build_native()
        self._begin = lambda _grad, native=self._native: native.output_gradient()
        self._install(trainable[::-1])
        _open_engines.add(self)

    # --- the moments of a step ---

    def before_forward(self, training: bool) -> None:
        """Called before each forward. Re-plans once after the first step; completes a backward that raised."""
        self._native.check_alive()
        if not (training and torch.is_grad_enabled()) or self._native.inside_backward:
            return
        self._native.abandon()
        order = self._native.take_arrival_order()
        if order is not None:
            self._install(order)
        self._native.survey()
        self.algorithm.before_forward(self.optimizer_steps)

    def after_forward(self, output: Any) -> Any:
        """Called with each forward's output, which is returned: its backward tells the engine that it begins."""
        if torch.is_grad_enabled() and self._native.sync:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._begin)
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
            work = _C.PythonWork(_weak_call(weakref.WeakMethod(self._call_bucket_ready)))
        return _C.Engine(
            comm=self._comm,
            control=self._control,
            params=self._params,
            names=self._names,
            work=work,
            on_late=_weak_call(weakref.WeakMethod(self._append_late)),
        )

    def _call_bucket_ready(self, bucket: Any) -> None:
        try:
            self.algorithm.bucket_ready(bucket)
        except Exception as error:
            place = f"rank {self._comm.rank}/{self._comm.size} step {self.backward_count} {bucket!r}"
            known = (ConfigError, CodecError, CommError)
            kind = next((each for each in known if isinstance(error, each)), GossamerError)
            raise kind(f"{place}: {self.algorithm!r}.bucket_ready raised {error!r}") from error

    def _install(self, order: list[int]) -> None:
        plan = self._plan(order)
        if [bucket.param_indices for bucket in self.buckets] == plan:
            return
        self._native.set_buckets([])
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
        self._native.append_buckets([bucket])

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

    def _describe(self) -> list[str]:
        return [
            f"parameter {name} {list(param.shape)} {param.dtype} {'trainable' if param.requires_grad else 'frozen'}"
            for name, param in zip(self._names, self._params, strict=True)
        ]

    def _refuse_unsupported(self, module: nn.Module) -> None:
        if not any(param.requires_grad for param in self._params):
            raise ConfigError("engine: the model has no parameter with requires_grad=True, nothing to train")
        for engine in _open_engines:
            if engine._comm is self._comm:
                raise ConfigError(
                    "engine: this communicator serves another model already, and their traffic would mix; "
                    "pass a process group, or a communicator of its own"
                )
            shared = {id(param) for param in engine._params} & {id(param) for param in self._params}
            if shared:
                name = next(n for n, p in zip(self._names, self._params, strict=True) if id(p) in shared)
                raise ConfigError(
                    f"engine: parameter '{name}' belongs to a model that is wrapped already; close() that first"
                )
        for name, param in zip(self._names, self._params, strict=True):
            _refuse_param(name, param, self._comm.device)
        for name, child in module.named_modules():
            if getattr(child, "sparse", False) is True and getattr(child, "weight", None) is not None:
                raise ConfigError(
                    f"engine: module '{name}' ({type(child).__name__}) makes sparse gradients, which are not "
                    f"supported yet; build it with sparse=False"
                )


def _refuse_param(name: str, param: Tensor, device: torch.device) -> None:
    what = f"engine: parameter '{name}'"
    if hasattr(param, "device_mesh"):
        raise ConfigError(f"{what} is a DTensor (FSDP or tensor parallel), which has its own reduction")
    if nn.parameter.is_lazy(param):
        raise ConfigError(f"{what} is not initialised yet; run one forward before wrapping the model")
    if not param.requires_grad:
        return
    if param.dtype not in _TRAINABLE_DTYPES:
        raise ConfigError(
            f"{what} must be float32, float64, float16 or bfloat16 to be trained, got {param.dtype}"
        )
    if param.device.type != device.type:
        raise ConfigError(f"{what} is on {param.device}, but the model's group is for {device.type} tensors")


def _describe_buffers(module: nn.Module) -> list[str]:
    return [f"buffer {name} {list(buffer.shape)} {buffer.dtype}" for name, buffer in module.named_buffers()]


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
