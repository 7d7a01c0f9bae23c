"""The engine of algorithms that are written in Bagua's hooks (algorithms/base.py): when a hook is called, and when a
bucket's operations run. Built-in algorithms run on the native engine instead.

Operations run on one worker thread, over connections of its own, in the order of the buckets: a bucket begins when its
tensors are ready and every bucket before it has begun. After the last bucket comes the first again.
"""

import atexit
import contextlib
import weakref
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.bagua.torch_api.asynchronous_operation import AsynchronousModelAverage
from gossamer.bagua.torch_api.bucket import BaguaBucket
from gossamer.bagua.torch_api.data_parallel.connections import BaguaConnections, private_connections
from gossamer.bagua.torch_api.data_parallel.rounds import BucketRounds
from gossamer.bagua.torch_api.tensor import (
    bagua_ensure_grad,
    bagua_getter_closure,
    bagua_tensor_name,
    forget,
    is_bagua_tensor,
    set_mark,
)
from gossamer.comm import Communicator, duplicate, is_communicator
from gossamer.engine import (
    Background,
    Members,
    broadcast_tensors,
    by_communicator,
    mean_tensors,
    plan_buckets,
    refusal_of,
    require_equal,
    require_same_model,
    tensors_in,
    weak_call,
)
from gossamer.torch_private import at_end_of_backward

_open_engines: "weakref.WeakSet[HookEngine]" = weakref.WeakSet()


class HookEngine:
    """One model, one AlgorithmImpl, one group. begin() makes the buckets.

    Args:
        ddp: the BaguaDistributedDataParallel that hooks are given; held weakly.
        ignore: names of parameters and buffers that are each rank's own.

    Raises:
        ConfigError: on every rank, if the model or the class of the algorithm differs between ranks, or the model
            cannot be trained this way.
    """

    def __init__(
        self,
        ddp: Any,
        module: nn.Module,
        connections: BaguaConnections,
        *,
        ignore: Collection[str],
        bucket_bytes: int,
    ) -> None:
        self._ddp: Any = weakref.proxy(ddp)
        self._impl = ddp.bagua_algorithm
        self._connections, self._bucket_bytes = connections, bucket_bytes
        self._members = Members(module, ignore)
        refusal = refusal_of(self._members, connections.comm, [])
        settings = (
            f"algorithm {type(self._impl).__name__}, bucket_bytes {bucket_bytes}, flatten {ddp.do_flatten}"
        )
        require_same_model(connections.control, self._members, settings, refusal)
        self.buckets: list[BaguaBucket] = []
        self._params = [(name, param) for name, param in self._members.parameters() if param.requires_grad]
        self._background = Background(connections.comm)
        self._groups: dict[Any, Communicator] = {}
        self._rounds = BucketRounds([], self._submit)
        self._hooks: list[Any] = []
        self._sync, self._inside, self._left_by_forward = True, False, False
        self._seen: set[int] = set()
        self._steps = 0
        _open_engines.add(self)

    def begin(self) -> None:
        """Copies rank 0's values, makes tensors, buckets, operations and hooks; again where it was done. Collective."""
        self._leave()
        self._broadcast()
        tensors = self._impl.init_tensors(self._ddp)
        effective = [bagua_getter_closure(tensor) for tensor in tensors]
        plan = plan_buckets(
            effective,
            range(len(tensors)),
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._bucket_bytes,
        )
        suggestion = [[tensors[index] for index in indices] for indices in plan]
        self.buckets = list(self._impl.tensors_to_buckets(suggestion, self._ddp.do_flatten))
        lines = [
            f"{bucket!r} of {[bagua_tensor_name(tensor) for tensor in bucket.tensors]}"
            for bucket in self.buckets
        ]
        require_equal(self._connections.control, lines, "the list of buckets")
        for bucket in self.buckets:
            bucket.attach(self._communicator)
            self._impl.init_operations(self._ddp, bucket)
        self._watch_tensors()
        self._watch_step()

    # --- the moments of a step ---

    def before_forward(self, training: bool, inputs: Any = ()) -> None:
        """Before each forward: those of training, with gradients, count."""
        self._leave_step()
        if not training or not torch.is_grad_enabled():
            return
        if self._inside:  # a backward that raised: the other ranks wait for the rest of it
            self._end_backward()
        self._ddp.bagua_train_step_counter += 1
        if self._impl.need_reset():
            self.wait()
            self.begin()
        with self._rounds.hook():
            self._forward_hook(inputs)

    def after_forward(self, output: Any) -> None:
        """After each forward: the backward of its output begins here, also if it recomputes parts of the forward."""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(weak_call(weakref.WeakMethod(self._begin_backward)))

    def wait(self) -> None:
        """Until all buckets that have begun are done. Raises their error."""
        self._background.wait()

    def consensus(self) -> None:
        """Replaces parameters and floating-point buffers by their exact mean over the ranks. Collective."""
        self.wait()
        buffers = [buffer for _, buffer in self._members.buffers() if buffer.is_floating_point()]
        params = [param for _, param in self._members.parameters()]
        for comm, on_device in self._by_communicator([*params, *buffers]):
            mean_tensors(comm, on_device)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward only accumulates."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def close(self) -> None:
        """Removes the hooks and ends the worker. Idempotent."""
        self._leave()
        self._background.close()
        _open_engines.discard(self)

    def _begin_backward(self, *_: Any) -> None:
        self._leave_step()
        if self._sync and not self._inside:
            self._inside = True
            self._seen.clear()
            at_end_of_backward(self._end_backward)

    def _gradient_ready(self, index: int, *_: Any) -> None:
        if not self._sync:
            return
        self._begin_backward()
        self._seen.add(index)
        with self._rounds.hook():
            self._backward_hook(*self._params[index])

    def _end_backward(self) -> None:
        if not self._inside:
            return
        self._inside = False
        self._steps += 1
        with self._rounds.hook():
            for index, (name, param) in enumerate(self._params):
                if index not in self._seen:  # unused: a gradient of zeros, so that all ranks send the same
                    if is_bagua_tensor(param) and bagua_getter_closure(param) is None:
                        bagua_ensure_grad(param)
                    self._backward_hook(name, param)
            self._post_backward_hook()
        self._rounds.require_whole("backward")

    def _step_begins(self, _optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        # A closure runs forwards and backwards of its own, in the middle of the step.
        self._left_by_forward = next(iter(arguments[1:]), named.get("closure")) is None
        for operation in self._asynchronous():
            operation.hold("step")

    def _leave_step(self) -> None:
        """The step before has raised, if the weights are held for it still: torch calls no hook then."""
        if self._left_by_forward:
            self._left_by_forward = False
            for operation in self._asynchronous():
                operation.let_go("step")

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._left_by_forward = False
        for operation in self._asynchronous():  # before the hook, which may wait for a round
            operation.let_go("step")
        with self._rounds.hook():
            self._post_step_hook(optimizer)
        self._rounds.require_whole("optimizer step")

    # --- wiring ---

    def _broadcast(self) -> None:
        tensors: list[Tensor] = [param for _, param in self._members.parameters()]
        tensors += [buffer for _, buffer in self._members.buffers()]
        for comm, on_device in self._by_communicator(tensors):
            broadcast_tensors(comm, on_device)
        self._ddp.broadcast_optimizers()

    def _by_communicator(self, tensors: list[Tensor]) -> list[tuple[Communicator, list[Tensor]]]:
        return by_communicator(self._connections.comm, self._connections.control, tensors)

    def _watch_tensors(self) -> None:
        self._rounds = BucketRounds(self.buckets, self._submit)
        rounds = weakref.ref(self._rounds)
        for number, bucket in enumerate(self.buckets):
            for index, tensor in enumerate(bucket.tensors):
                set_mark(tensor, partial(_mark, rounds, number, index))

    def _watch_step(self) -> None:
        self._forward_hook = self._impl.init_forward_pre_hook(self._ddp)
        self._backward_hook = self._impl.init_backward_hook(self._ddp)
        self._post_backward_hook = self._impl.init_post_backward_hook(self._ddp)
        self._post_step_hook = self._impl.init_post_optimizer_step_hook(self._ddp)
        ready = weak_call(weakref.WeakMethod(self._gradient_ready))
        for index, (_, param) in enumerate(self._params):
            self._hooks.append(param.register_post_accumulate_grad_hook(partial(ready, index)))
        stepped = weak_call(weakref.WeakMethod(self._stepped))
        begins = weak_call(weakref.WeakMethod(self._step_begins))
        for optimizer in self._ddp.bagua_optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(begins))
            self._hooks.append(optimizer.register_step_post_hook(stepped))

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._rounds.end()
        for operation in self._asynchronous():
            operation.let_go()
        for bucket in self.buckets:
            for tensor in bucket.tensors:
                forget(tensor)
        self.buckets = []

    def _asynchronous(self) -> list[AsynchronousModelAverage]:
        return [operation for bucket in self.buckets for operation in bucket.asynchronous()]

    def _submit(self, bucket: BaguaBucket) -> None:
        what = f"step {self._steps} {bucket!r}: {type(self._impl).__name__}"
        self._background.submit(bucket.run, what)

    def _communicator(self, group: Any, hierarchical: bool) -> Communicator:
        """What operations of a bucket communicate through. Collective, the first time."""
        own = group is None or group is self._ddp.process_group
        key = None if own else group
        by_hosts = hierarchical or (own and self._connections.always_by_hosts)
        if (key, False) not in self._groups:
            self._groups[key, False] = self._background.comm if own else self._connect(group)
        if by_hosts and (key, True) not in self._groups:
            self._groups[key, True] = self._connections.by_hosts(self._groups[key, False])
        return self._groups[key, by_hosts]

    def _connect(self, group: Any) -> Communicator:
        if is_communicator(group):
            return duplicate(group)
        return private_connections(group, self._connections.device)[0]


def _mark(rounds: "weakref.ref[BucketRounds]", number: int, index: int) -> None:
    alive = rounds()
    if alive is not None:
        alive.mark(number, index)


@atexit.register
def _close_all() -> None:
    # Before the interpreter ends: a worker that runs Python must not outlive it.
    for engine in list(_open_engines):
        engine.close()
