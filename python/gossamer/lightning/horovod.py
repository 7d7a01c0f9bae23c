"""HorovodStrategy: the class of Lightning 1.6 to 1.9, over the Horovod face. A mixin; see gossamer.lightning.pytorch.

Processes come from a launcher (gossamer run, torchrun, mpirun). The model is not wrapped: its optimizers are.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gossamer.horovod.torch as hvd
from gossamer.errors import ConfigError
from gossamer.lightning.rates import scale_learning_rates
from gossamer.lightning.trainer import Collective

_NEVER = 2**31 - 1  # gradients before a reduction
_OPERATIONS = {
    "sum": (hvd.Sum, dist.ReduceOp.SUM),
    "max": (hvd.Max, dist.ReduceOp.MAX),
    "min": (hvd.Min, dist.ReduceOp.MIN),
    "product": (hvd.Product, dist.ReduceOp.PRODUCT),
}


class HorovodStrategy(Collective):
    """Trains with hvd.DistributedOptimizer, on CPUs or GPUs. A Trainer that is given it calls hvd.init().

    Learning rates, and those that schedulers go by, are multiplied by the number of ranks. Rank 0's weights, buffers
    and optimizer states are given to all. Gradients are averaged while backward runs, in the last backward of those
    that accumulate; clipping sees the averages. After a backward by hand, those of all optimizers are averaged.

    Args:
        accelerator, checkpoint_io, precision_plugin: as of Lightning's DDPStrategy.
        parallel_devices: one for each process of this host; one of CPUs, or devices=1, stands for as many.
    """

    environment: Any  # HorovodEnvironment in this namespace
    optimizers: list[Any]
    parallel_devices: Any
    _blocked = _failed = False

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=self.environment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    # --- who takes part ---

    def _configure_launcher(self) -> None:
        """None: the processes are there."""

    def set_world_ranks(self) -> None:
        hvd.init()
        self._use_devices_of_host()
        super().set_world_ranks()

    def setup_distributed(self) -> None:
        self.set_world_ranks()

    def _use_devices_of_host(self) -> None:
        devices, here = list(self.parallel_devices), hvd.local_size()
        if self.num_nodes not in (1, hvd.cross_size()):
            raise ConfigError(
                f"HorovodStrategy: num_nodes is for the launcher to say, which has started {hvd.cross_size()}, got "
                f"{self.num_nodes}; leave it out"
            )
        cuda = devices[0].type == "cuda"
        if len(devices) == 1:
            devices = [torch.device("cuda", index) if cuda else devices[0] for index in range(here)]
        if len(devices) != here and not (cuda and len(devices) > here):
            raise ConfigError(
                f"HorovodStrategy: the launcher has started {here} processes on this host, and devices are "
                f"{len(devices)}; give devices=1 or devices={here}"
            )
        self.parallel_devices = devices[:here]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # --- collectives ---

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A new tensor; the mean of integers has fractions. None is the mean. What is no tensor: itself."""
        if not isinstance(tensor, Tensor) or not hvd.is_initialized():
            return tensor
        _require_all("reduce", group)
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        if name in (None, "mean", "avg", dist.ReduceOp.AVG):
            exact = tensor.is_floating_point() or tensor.is_complex()
            return hvd.allreduce(tensor) if exact else hvd.allreduce(tensor, op=hvd.Sum) / hvd.size()
        for known, (op, torchs) in _OPERATIONS.items():
            if name in (known, torchs):
                return hvd.allreduce(tensor, op=op)
        raise ConfigError(
            f"HorovodStrategy.reduce: unrecognized `reduce_op`, must be mean, avg, {', '.join(_OPERATIONS)} or None, "
            f"got {reduce_op!r}"
        )

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The ranks' tensors one after the other along dimension 0, which may differ; 0 dimensions count as 1.

        The gradient is the mean over the ranks, with either value of sync_grads.
        """
        if not hvd.is_initialized():
            return tensor
        _require_all("all_gather", group)
        return hvd.allgather(tensor.reshape(1) if tensor.ndim == 0 else tensor)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return hvd.broadcast_object(obj, root_rank=src) if hvd.is_initialized() else obj

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if hvd.is_initialized():
            hvd.barrier()

    def join(self) -> None:
        """Answers what other ranks reduce, until all ranks have joined. Collective."""
        hvd.join()

    # --- training ---

    def setup(self, trainer: Any) -> None:
        self._failed = False
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Nothing: optimizers are what is wrapped."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        schedulers = [each.scheduler for each in self.lr_scheduler_configs]
        scale_learning_rates(self.optimizers, schedulers, hvd.size())
        state = self.lightning_module.state_dict()
        hvd.broadcast_parameters({name: each for name, each in state.items() if isinstance(each, Tensor)}, 0)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.LBFGS):  # whose state is empty yet
                hvd.broadcast_optimizer_state(optimizer, 0)
        self.optimizers = [self._distributed(optimizer) for optimizer in self.optimizers]

    def _distributed(self, optimizer: Any) -> Any:
        if hasattr(optimizer, "skip_synchronize"):
            return optimizer  # by configure_optimizers()
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        named = self.lightning_module.named_parameters()
        return hvd.DistributedOptimizer(optimizer, [(name, each) for name, each in named if id(each) in own])

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it, backward accumulates without communication."""
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        passes = _NEVER if self._blocked else 1
        for optimizer in self.optimizers:
            if optimizer.backward_passes_per_step != passes:
                optimizer.set_backward_passes_per_step(passes)

    def post_backward(self, closure_loss: Tensor) -> None:
        if not self._blocked:
            for optimizer in self.optimizers:
                optimizer.synchronize()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        with optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)
        hvd.shutdown()  # so that ranks that wait for this one get an error

    def teardown(self) -> None:
        if self.lightning_module is not None and not self._failed and self.optimizers:
            self.join()
        super().teardown()


def _require_all(where: str, group: Any) -> None:
    if group not in (None, dist.group.WORLD):
        raise ConfigError(f"HorovodStrategy.{where}: group must be None, which is all ranks, got {group!r}")
