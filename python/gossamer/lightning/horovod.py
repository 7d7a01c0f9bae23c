"""HorovodStrategy: the class of Lightning 1.6 to 1.9, on the Horovod face. A mixin; see gossamer.lightning.pytorch.

A launcher starts the processes (gossamer run, torchrun, mpirun). The strategy wraps the optimizers, and not the model.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gossamer.horovod.torch as hvd
from gossamer.errors import ConfigError
from gossamer.lightning.horovod_environment import devices_of_host
from gossamer.lightning.trainer import Collective

# Schedulers keep the rates after the first beside the current one.
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs")
_NEVER = 2**31 - 1  # gradients until a reduction
_OPERATIONS = {
    "sum": (hvd.Sum, dist.ReduceOp.SUM),
    "max": (hvd.Max, dist.ReduceOp.MAX),
    "min": (hvd.Min, dist.ReduceOp.MIN),
    "product": (hvd.Product, dist.ReduceOp.PRODUCT),
}


class HorovodStrategy(Collective):
    """Trains with hvd.DistributedOptimizer, on CPUs or GPUs. The Trainer calls hvd.init().

    The strategy multiplies learning rates, those of schedulers too, by the number of ranks. It copies weights, buffers
    and optimizer states from rank 0. Gradients are averaged while backward runs; if they accumulate, in the last
    backward. Clipping sees the averages. A manual backward averages the gradients of all optimizers.

    Args:
        accelerator, checkpoint_io, precision_plugin: as in Lightning's DDPStrategy.
        parallel_devices: one device for each process of this host. One CPU, or devices=1, stands for all of them.
    """

    environment: Any  # the HorovodEnvironment of this Lightning package
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
        super().__init__(accelerator, parallel_devices, self.environment(), checkpoint_io, precision_plugin)

    # --- who takes part ---

    def _configure_launcher(self) -> None:
        """Do nothing: the processes exist already."""

    def set_world_ranks(self) -> None:
        hvd.init()
        self.parallel_devices = devices_of_host(list(self.parallel_devices), self.num_nodes)
        super().set_world_ranks()

    def setup_distributed(self) -> None:
        self.set_world_ranks()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # --- collectives ---

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the reduction as a new tensor, or what is no tensor unchanged. None is the mean, which is a float.

        Raises:
            ConfigError: A group is given, or the reduction is unknown.
        """
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

    def all_gather(  # type: ignore[override]
        self,
        result: Tensor | None = None,
        group: Any = None,
        sync_grads: bool = False,
        *,
        tensor: Tensor | None = None,
    ) -> Tensor:
        """Return the ranks' tensors, joined along dimension 0, whose size may differ. A scalar counts as [1].

        The gradient is the mean over the ranks, whatever sync_grads is.

        Args:
            result: this rank's tensor, under Lightning 1.9's name.
            tensor: this rank's tensor, under Lightning 2's name.

        Raises:
            ConfigError: A group is given.
            TypeError: Both are given, or neither.
        """
        if (result is None) == (tensor is None):
            given = "both" if tensor is not None else "neither"
            raise TypeError(f"HorovodStrategy.all_gather: give result or tensor, got {given}")
        own: Any = tensor if result is None else result
        if not hvd.is_initialized():
            return own
        _require_all("all_gather", group)
        return hvd.allgather(own.reshape(1) if own.ndim == 0 else own)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return hvd.broadcast_object(obj, root_rank=src) if hvd.is_initialized() else obj

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if hvd.is_initialized():
            hvd.barrier()

    def join(self) -> None:
        """Take part in the other ranks' reductions until all ranks have joined. Collective."""
        hvd.join()

    # --- training ---

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True, as in Lightning 1.9: Lightning calls optimizer_step() for every batch, and that decides when to step.

        It is False in the last batch of an epoch, so that Lightning counts the step of a shorter accumulation.
        """
        module = self.lightning_module
        if module is None or module._trainer is None or not module.trainer.training:
            return True
        return not module.trainer.fit_loop.epoch_loop._num_ready_batches_reached()

    def setup(self, trainer: Any) -> None:
        self._failed = False
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Do nothing: the optimizers are wrapped, and not the model."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            _scale_groups(optimizer.param_groups, hvd.size())
        for config in self.lr_scheduler_configs:
            _scale_scheduler(config.scheduler, hvd.size())
        state = self.lightning_module.state_dict()
        hvd.broadcast_parameters({name: each for name, each in state.items() if isinstance(each, Tensor)}, 0)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.LBFGS):  # LBFGS has no state yet
                hvd.broadcast_optimizer_state(optimizer, 0)
        self.optimizers = [self._distributed(optimizer) for optimizer in self.optimizers]

    def _distributed(self, optimizer: Any) -> Any:
        if hasattr(optimizer, "skip_synchronize"):
            return optimizer  # configure_optimizers() has wrapped it
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        named = self.lightning_module.named_parameters()
        return hvd.DistributedOptimizer(optimizer, [(name, each) for name, each in named if id(each) in own])

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backward accumulate gradients without communication."""
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
        module = self.lightning_module
        if module.automatic_optimization and module.trainer.fit_loop._should_accumulate():
            with self.block_backward_sync():
                return closure()
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


def _scale_groups(groups: list[dict[str, Any]], factor: int) -> None:
    for group in groups:
        for key in _RATES_OF_GROUPS:
            if group.get(key) is not None:
                group[key] = group[key] * factor


def _scale_scheduler(scheduler: Any, factor: int) -> None:
    for inner in getattr(scheduler, "_schedulers", ()):  # of ChainedScheduler and SequentialLR
        _scale_scheduler(inner, factor)
    for name in _RATES_OF_SCHEDULERS:
        if hasattr(scheduler, name):
            setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
