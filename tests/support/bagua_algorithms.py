"""Algorithms as users of Bagua wrote them, by its hooks. tests/bagua/test_hooks.py trains with them."""

import time
from concurrent.futures import ThreadPoolExecutor

from gossamer.bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from gossamer.bagua.torch_api.bucket import BaguaBucket
from gossamer.bagua.torch_api.tensor import (
    bagua_mark_communication_ready,
    bagua_mark_communication_ready_without_synchronization,
    ensure_bagua_tensor,
)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "never"
        time.sleep(0.002)


class Of(Algorithm):
    """Declares an AlgorithmImpl, with arguments."""

    def __init__(self, impl, *arguments):
        self.impl, self.arguments = impl, arguments

    def reify(self, process_group):
        return self.impl(process_group, *self.arguments)


class MeanGradients(AlgorithmImpl):
    def __init__(self, process_group, **options):
        super().__init__(process_group)
        self.options = options

    def init_operations(self, bagua_ddp, bucket):
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(group=self.process_group, **self.options)


class PaddedBytes(MeanGradients):
    def __init__(self, process_group):
        super().__init__(process_group, hierarchical=True, scattergather=True, compression="MinMaxUInt8")

    def tensors_to_buckets(self, tensors, do_flatten):
        return [
            BaguaBucket(group, flatten=do_flatten, name=str(index), alignment=8)
            for index, group in enumerate(tensors)
        ]


class Weights(AlgorithmImpl):
    """What algorithms that send weights have in common."""

    def init_tensors(self, bagua_ddp):
        self.ddp = bagua_ddp
        name = bagua_ddp.bagua_module_name
        self.tensors = [
            ensure_bagua_tensor(param, each, name) for each, param in bagua_ddp.bagua_build_params()
        ]
        return self.tensors

    def tensors_to_buckets(self, tensors, do_flatten):
        self.buckets = [BaguaBucket([each for group in tensors for each in group], "all", do_flatten, 8)]
        return self.buckets

    def init_backward_hook(self, bagua_ddp):
        return lambda name, param: None

    def mark(self):
        for tensor in self.tensors:
            bagua_mark_communication_ready(tensor)


class MeanWeights(Weights):
    """Averages weights from before the forward to the end of backward."""

    def __init__(self, process_group, mode="all"):
        super().__init__(process_group)
        self.mode = mode

    def init_operations(self, bagua_ddp, bucket):
        self.operation = bucket.append_decentralized_synchronous_op(
            peer_weight=bucket.flattened_tensor(),
            hierarchical=False,
            peer_selection_mode=self.mode,
            group=self.process_group,
        )

    def init_forward_pre_hook(self, bagua_ddp):
        return lambda inputs: self.mark()

    def init_post_backward_hook(self, bagua_ddp):
        def hook():
            bagua_ddp._bagua_backend.wait_pending_comm_ops()
            for bucket in self.buckets:
                self.operation.copy_back_peer_weight(bucket.backend_bucket)

        return hook


class LowPrecision(Weights):
    """Compressed differences after the optimizer's step."""

    def init_operations(self, bagua_ddp, bucket):
        self.replicas = [bucket.flattened_tensor() for _ in range(3)]
        bucket.append_low_precision_decentralized_synchronous_op(*self.replicas, group=self.process_group)

    def init_post_backward_hook(self, bagua_ddp):
        return lambda: None

    def init_post_optimizer_step_hook(self, bagua_ddp):
        def hook(optimizer):
            self.mark()
            bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return hook


class Asynchronous(Weights):
    """Averages weights from a thread of its own; mean gradients in the first `warmup` forwards."""

    def __init__(self, process_group, warmup=0, interval_s=0.0, buckets=1):
        super().__init__(process_group)
        self.warmup, self.interval_s, self.count = warmup, interval_s, buckets
        self.forwards = self.rounds = 0
        self.operations, self.loop = [], None
        self.threads = ThreadPoolExecutor(max_workers=1)

    @property
    def warming_up(self):
        return self.forwards <= self.warmup and self.warmup > 0

    def need_reset(self):
        self.forwards += 1
        return self.warmup > 0 and self.forwards == self.warmup + 1

    def init_tensors(self, bagua_ddp):
        return (
            AlgorithmImpl.init_tensors(self, bagua_ddp)
            if self.warming_up
            else super().init_tensors(bagua_ddp)
        )

    def tensors_to_buckets(self, tensors, do_flatten):
        if self.warming_up:
            return AlgorithmImpl.tensors_to_buckets(self, tensors, do_flatten)
        every = [tensor for group in tensors for tensor in group]
        parts = [every[first :: self.count] for first in range(self.count)]
        return [BaguaBucket(part, str(number), do_flatten) for number, part in enumerate(parts)]

    def init_operations(self, bagua_ddp, bucket):
        bucket.clear_ops()
        if self.warming_up:
            bucket.append_centralized_synchronous_op(group=self.process_group)
        else:
            self.operations.append(
                bucket.append_asynchronous_model_average_op("all", group=self.process_group)
            )

    def init_forward_pre_hook(self, bagua_ddp):
        def hook(inputs):
            if self.warming_up:
                return
            if self.forwards == self.warmup + 1:
                self.begin()
            for operation in self.operations:
                operation.lock_weight()

        return hook

    def init_backward_hook(self, bagua_ddp):
        usual = AlgorithmImpl.init_backward_hook(self, bagua_ddp)
        return lambda name, param: usual(name, param) if self.warming_up else None

    def init_post_backward_hook(self, bagua_ddp):
        def hook():
            if self.warming_up:
                bagua_ddp._bagua_backend.wait_pending_comm_ops()
            for operation in self.operations:
                operation.unlock_weight()

        return hook

    def begin(self):
        if self.loop is None:
            self.loop = self.threads.submit(self.run)

    def run(self):
        while all(operation.get_status() for operation in self.operations):
            for tensor in self.tensors:
                bagua_mark_communication_ready_without_synchronization(tensor)
            self.ddp._bagua_backend.wait_pending_comm_ops()
            self.rounds += 1
            time.sleep(self.interval_s)

    def abort(self, model):
        assert model.bagua_algorithm is self
        for operation in self.operations:
            operation.abort()
        if self.loop is not None:
            self.loop.result(30)
        self.loop = None

    def resume(self, model):
        assert model.bagua_algorithm is self
        for operation in self.operations:
            operation.reset()
        self.begin()
