"""Algorithms as users of Bagua wrote them, by its hooks. Not a test file; test_bagua_hooks.py trains with them."""

from gossamer.bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from gossamer.bagua.torch_api.bucket import BaguaBucket
from gossamer.bagua.torch_api.tensor import bagua_mark_communication_ready, ensure_bagua_tensor


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
