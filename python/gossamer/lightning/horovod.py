"""HorovodStrategy: the class of Lightning 1.6 to 1.9, over the Horovod face. A mixin; see gossamer.lightning.pytorch.

Processes come from a launcher (gossamer run, torchrun, mpirun). The model is not wrapped: its optimizers are.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import gossamer.horovod.torch as hvd
from gossamer.lightning import horovod_reductions
from gossamer.lightning.horovod_environment import devices_of_host
from gossamer.lightning.rates import scale_learning_rates
from gossamer.lightning.trainer import Collective

_NEVER = 2**31 - 1  # gradients before a reduction


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
        self.parallel_devices = devices_of_host(list(self.parallel_devices), self.num_nodes)
        super().set_world_ranks()

    def setup_distributed(self) -> None:
        self.set_world_ranks()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # --- collectives ---

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A new tensor; the mean of integers has fractions. None is the mean. What is no tensor: itself."""
        if not isinstance(tensor, Tensor) or not hvd.is_initialized():
            return tensor
        return horovod_reductions.reduce(tensor, group, reduce_op)

    def all_gather(  # type: ignore[override]
        self,
        result: Tensor | None = None,
        group: Any = None,
        sync_grads: bool = False,
        *,
        tensor: Tensor | None = None,
    ) -> Tensor:
        """The ranks' tensors one after the other along dimension 0, which may differ; 0 dimensions count as 1.

        The gradient is the mean over the ranks, with either value of sync_grads.

        Args:
            result: this rank's tensor, under the name that Lightning 1.9 gave it.
            tensor: the same, under the name that Lightning 2 gives it.

        Raises:
            TypeError: both, or neither.
        """
        if (result is None) == (tensor is None):
            given = "both" if tensor is not None else "neither"
            raise TypeError(f"HorovodStrategy.all_gather: give result or tensor, got {given}")
        own: Any = tensor if result is None else result
        return horovod_reductions.gather(own, group) if hvd.is_initialized() else own

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return hvd.broadcast_object(obj, root_rank=src) if hvd.is_initialized() else obj

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if hvd.is_initialized():
            hvd.barrier()

    def join(self) -> None:
        """Answers what other ranks reduce, until all ranks have joined. Collective."""
        hvd.join()

    # --- training ---

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True, as in Lightning 1.9: Lightning calls optimizer_step() for every batch, which knows when to step.

        False in the last batch of an epoch, so that Lightning counts the step of a window that is shorter.
        """
        module = self.lightning_module
        if module is None or module._trainer is None or not module.trainer.training:
            return True
        return not module.trainer.fit_loop.epoch_loop._num_ready_batches_reached()

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
