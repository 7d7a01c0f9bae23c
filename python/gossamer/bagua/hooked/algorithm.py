"""HookAlgorithm: an AlgorithmImpl of Bagua as an algorithm of the engine."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from gossamer import _C
from gossamer.algorithms import Algorithm
from gossamer.bagua.hooked.asynchronous import AsynchronousModelAverage
from gossamer.bagua.hooked.sequence import BucketSequence
from gossamer.bagua.torch_api.bucket import BaguaBucket
from gossamer.bagua.torch_api.process_group import torch_group_of
from gossamer.bagua.torch_api.tensor import (
    bagua_ensure_grad,
    bagua_getter_closure,
    bagua_tensor_name,
    forget,
    is_bagua_tensor,
    set_mark,
)
from gossamer.comm import Communicator, duplicate, hierarchy, is_communicator, private
from gossamer.engine import Background, Worker, plan_buckets, require_equal, weak_call
from gossamer.errors import ConfigError


class HookAlgorithm(Algorithm):
    """Calls the hooks of one AlgorithmImpl for one model.

    Args:
        ddp: the BaguaDistributedDataParallel that the hooks are given. It is held weakly.
        impl: an AlgorithmImpl.
        bucket_bytes: size of the buckets that tensors_to_buckets() is offered.
    """

    # The engine's buckets only count gradients; what travels lies in Bagua's buckets.
    fields: ClassVar[tuple[str, ...]] = ()
    follows_gradients = True
    lockstep = False  # the hooks decide when ranks wait for each other
    independent = True

    def __init__(self, ddp: Any, impl: Any, *, bucket_bytes: int) -> None:
        self._ddp: Any = weakref.proxy(ddp)
        self._impl, self._bucket_bytes = impl, bucket_bytes
        self.flatten: bool = ddp.do_flatten
        self.buckets: list[BaguaBucket] = []
        self._background: Background | None = None
        # By group, None for the model's own. One by hosts also counts the bytes of the flat one inside it.
        self._flat: dict[Any, Communicator] = {}
        self._by_hosts: dict[Any, Communicator] = {}
        self._sequence = BucketSequence([], self._submit)
        self._optimizer_hooks: list[Any] = []
        self._backwards = 0
        self._step_to_leave = False  # an optimizer step has begun, and torch may call no hook at its end

    def __repr__(self) -> str:
        return f"{type(self._impl).__name__} (in Bagua's hooks, flatten={self.flatten})"

    def connect(self, worker: Worker) -> None:
        super().connect(worker)
        for optimizer in self._ddp.bagua_optimizers:
            begins, ended = (
                weak_call(weakref.WeakMethod(moment)) for moment in (self._step_begins, self._step_ended)
            )
            self._optimizer_hooks.append(optimizer.register_step_pre_hook(begins))
            self._optimizer_hooks.append(optimizer.register_step_post_hook(ended))

    def setup(self, comm: Any, buckets: list["_C.Bucket"]) -> None:
        if self._background is None:
            self._always_by_hosts = isinstance(comm, _C.ByHosts)
            self._background = Background(comm.world if self._always_by_hosts else comm)

    def gradient_ready(self, name: str, param: nn.Parameter) -> None:
        self._leave_step()
        with self._sequence.hook():
            self._backward_hook(name, param)

    def after_backward(self, missing: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._leave_step()
        self._backwards += 1
        with self._sequence.hook():
            for name, param in missing:  # with zeros as gradient, so that all ranks send the same
                if is_bagua_tensor(param) and bagua_getter_closure(param) is None:
                    bagua_ensure_grad(param)
                self._backward_hook(name, param)
            self._post_backward_hook()
        self._sequence.require_whole("backward")

    def leave(self) -> None:
        self._unhook()
        super().leave()

    def close(self, *, crashed: bool = False) -> None:
        self._unhook()
        if self._background is not None:
            self._background.close(crashed=crashed)  # lets the operation that runs end, with its tensors
        self._forget_tensors()

    @property
    def bytes_sent(self) -> int:
        return sum(comm.bytes_sent for comm in (self._flat | self._by_hosts).values())

    @property
    def bytes_received(self) -> int:
        return sum(comm.bytes_received for comm in (self._flat | self._by_hosts).values())

    def state_dict(self) -> dict[str, Any]:
        raise ConfigError(
            f"algorithm_state_dict: {self!r} keeps its state itself, so it cannot be saved here; save it yourself"
        )

    def begin(self) -> None:
        """Makes tensors, buckets, operations and hooks. Older operations have ended. Collective."""
        self._forget_tensors()
        tensors = self._impl.init_tensors(self._ddp)
        plan = plan_buckets(
            [bagua_getter_closure(tensor) for tensor in tensors],
            range(len(tensors)),
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._bucket_bytes,
        )
        suggestion = [[tensors[index] for index in indices] for indices in plan]
        self.buckets = list(self._impl.tensors_to_buckets(suggestion, self.flatten))
        lines = [f"{bucket!r} of {[*map(bagua_tensor_name, bucket.tensors)]}" for bucket in self.buckets]
        require_equal(self._ddp.links.control, lines, "the list of buckets")
        for bucket in self.buckets:
            bucket.communicator_of = self._communicator
            self._impl.init_operations(self._ddp, bucket)
        self._sequence = BucketSequence(self.buckets, self._submit)
        mark = weak_call(weakref.WeakMethod(self._sequence.mark))
        for number, bucket in enumerate(self.buckets):
            for index, tensor in enumerate(bucket.tensors):
                set_mark(tensor, partial(mark, number, index))
        self._forward_hook = self._impl.init_forward_pre_hook(self._ddp)
        self._backward_hook = self._impl.init_backward_hook(self._ddp)
        self._post_backward_hook = self._impl.init_post_backward_hook(self._ddp)
        self._post_step_hook = self._impl.init_post_optimizer_step_hook(self._ddp)

    def enter_forward(self, inputs: Any, *, training: bool) -> None:
        """Called before each forward, after the engine's own work. `training`: the forward records gradients."""
        self._leave_step()
        if not training:
            return
        if self._impl.need_reset():
            self.wait()
            self._end_operations()
            self._ddp.broadcast()
            self.begin()
        with self._sequence.hook():
            self._forward_hook(inputs)

    def wait(self) -> None:
        """Returns when all buckets that have begun are done. Raises their error."""
        if self._background is not None:
            self._background.wait()

    settle = wait

    def _step_begins(self, _optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        # Asynchronous operations must not change weights in a step. A closure runs forwards and backwards in it.
        self._step_to_leave = next(iter(arguments[1:]), named.get("closure")) is None
        for operation in self._asynchronous():
            operation.hold("step")

    def _leave_step(self) -> None:
        """Ends a step that has raised, for which torch calls no hook."""
        if self._step_to_leave:
            self._end_step()

    def _end_step(self) -> None:
        self._step_to_leave = False
        for operation in self._asynchronous():
            operation.let_go("step")

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._end_step()  # before the hook, which may wait for a round
        with self._sequence.hook():
            self._post_step_hook(optimizer)
        self._sequence.require_whole("optimizer step")

    def _unhook(self) -> None:
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks = []
        self._end_operations()

    def _end_operations(self) -> None:
        self._sequence.end()
        for operation in self._asynchronous():
            operation.let_go()

    def _forget_tensors(self) -> None:
        for bucket in self.buckets:
            for tensor in bucket.tensors:
                forget(tensor)
        self.buckets = []

    def _asynchronous(self) -> list[AsynchronousModelAverage]:
        return [operation for bucket in self.buckets for operation in bucket.asynchronous()]

    def _submit(self, bucket: BaguaBucket) -> None:
        assert self._background is not None
        what = f"step {self._backwards} {bucket!r}: {type(self._impl).__name__}"
        self._background.submit(bucket.run, what, waits=bool(bucket.asynchronous()))

    def _communicator(self, group: Any, hierarchical: bool) -> Communicator:
        """Returns the communicator of a bucket's operations. Collective the first time for a group."""
        assert self._background is not None
        own = group is None or group is self._ddp.process_group
        key = None if own else group
        if key not in self._flat:
            self._flat[key] = self._background.comm if own else self._connect(group)
        if not hierarchical and not (own and self._always_by_hosts):
            return self._flat[key]
        if key not in self._by_hosts:
            # A Hierarchical may name the hosts of the model's own group; those of another group are looked up.
            hosts = getattr(self._ddp.process_group, "hosts", None) if own else None
            self._by_hosts[key] = hierarchy(self._flat[key], hosts)
        return self._by_hosts[key]

    def _connect(self, group: Any) -> Communicator:
        group = torch_group_of("with_bagua", group)
        assert self._background is not None
        return duplicate(group) if is_communicator(group) else private(group, self._background.comm.device)[0]
