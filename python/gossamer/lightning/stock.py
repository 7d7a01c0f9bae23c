"""DDPStrategy: Lightning's own strategy with torch's DistributedDataParallel; every argument works on every device.

A mixin; see gossamer.lightning.pytorch. It adds hooks on CPUs, post-local SGD for each optimizer, and checkpoints.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from gossamer.comm import Communicator, private
from gossamer.engine import mean_tensors
from gossamer.errors import ConfigError
from gossamer.lightning.checkpoint import on_rank_0
from gossamer.lightning.distributed import register_ddp_comm_hook, require_hook
from gossamer.lightning.keywords import require_keywords
from gossamer.lightning.trainer import Collective

KEY = "gossamer_ddp"  # in a checkpoint


class DDPStrategy(Collective):
    """lightning.pytorch.strategies.DDPStrategy, with hooks and post-local SGD also on CPUs.

    Post-local SGD averages the parameters of an optimizer at its first step with local gradients, and at every
    `model_averaging_period`-th such step after it. Checkpoints hold its counters, and a ddp_comm_state that has a
    state_dict().

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout, start_method: as in Lightning. The backend may be "gossamer".
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper: as in register_ddp_comm_hook().
        model_averaging_period: steps between two averages; needs a PostLocalSGDState.
        kwargs: arguments of torch's DistributedDataParallel.

    Raises:
        ConfigError: A state or wrapper has no hook, or only one of model_averaging_period and a PostLocalSGDState is
            given.
        TypeError: DistributedDataParallel does not have an argument of kwargs.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: str = "popen",
        **kwargs: Any,
    ) -> None:
        require_hook("DDPStrategy", ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
        is_local = isinstance(ddp_comm_state, PostLocalSGDState)
        if is_local != (model_averaging_period is not None):
            raise ConfigError(
                f"DDPStrategy: model_averaging_period and a PostLocalSGDState need each other, got "
                f"{model_averaging_period!r} and {ddp_comm_state!r}"
            )
        if model_averaging_period is not None and model_averaging_period < 1:
            raise ConfigError(
                f"DDPStrategy: model_averaging_period must be a positive number of steps, got {model_averaging_period}"
            )
        require_keywords(type(self), DistributedDataParallel, kwargs, taken=2)  # after module and device_ids
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **kwargs,
        )
        self._averages: Averages | None = None

    def _register_ddp_hooks(self) -> None:
        register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    def _enable_model_averaging(self) -> None:
        super()._enable_model_averaging()  # refuses optimizers that are distributed themselves
        self._model_averager = None
        state: Any = self._ddp_comm_state
        if state.subgroup is None:  # as torch makes it, but also without GPUs
            state.subgroup, _ = dist.new_subgroups(group_size=self.num_processes)
        comm, _ = private(state.process_group, self.root_device)
        period = self._model_averaging_period or 1
        self._averages = Averages(state, period, comm, len(self.optimizers))

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._averages is not None:
            index = next(i for i, each in enumerate(self.optimizers) if each is optimizer)
            self._averages.after_step(index, optimizer)
        return output

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        own: dict[str, Any] = {}
        if self._averages is not None:
            own["averages"] = self._averages.state_dict()
        if hasattr(self._ddp_comm_state, "state_dict") and not self._interrupted():
            own["states"] = on_rank_0(self._ddp_comm_state.state_dict())
        if own and "optimizer_states" in checkpoint:
            checkpoint = {**checkpoint, KEY: own}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        own = checkpoint.get(KEY, {})
        if self._averages is not None and "averages" in own:
            self._averages.load_state_dict(own["averages"])
        states = own.get("states")
        if states is None:
            return
        if len(states) != self.world_size:
            raise ConfigError(
                f"checkpoint: the state of ddp_comm_hook was saved by {len(states)} ranks, and this run has "
                f"{self.world_size}; resume with equally many ranks, or load its weights alone and begin anew"
            )
        self._ddp_comm_state.load_state_dict(states[self.global_rank])

    def setup(self, trainer: Any) -> None:
        self._averages = None  # a checkpoint after the last fit() still needed it
        super().setup(trainer)


class Averages:
    """Averages each optimizer's parameters over all ranks, while gradients are local.

    Args:
        state: the state of the hook. Its `iter` stays at start_localSGD_iter once gradients are local.
        period: steps of an optimizer between two averages.
        comm: the communicator of all ranks.
        count: the number of optimizers.
    """

    def __init__(self, state: PostLocalSGDState, period: int, comm: Communicator, count: int) -> None:
        self._state, self._period, self._comm = state, period, comm
        self._local_steps = [0] * count
        self._seen = state.iter  # state.iter at the last step of any optimizer

    def after_step(self, index: int, optimizer: Any) -> None:
        """Count a step of one optimizer, and average its parameters if the step is due. Collective if it is."""
        was_local = self._seen >= self._state.start_localSGD_iter
        self._seen = self._state.iter
        if not was_local:
            return
        if self._local_steps[index] % self._period == 0:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            with torch.no_grad():
                mean_tensors(self._comm, [param for param in params if param.grad is not None])
        self._local_steps[index] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, which are equal on all ranks."""
        return {"local_steps": list(self._local_steps), "seen": self._seen, "iter": self._state.iter}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what state_dict() returned."""
        self._local_steps, self._seen = list(saved["local_steps"]), saved["seen"]
        self._state.iter = saved["iter"]
