"""What a model gets by with_bagua(): its algorithm, and the engine that calls it."""

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gossamer.bagua.torch_api import env
from gossamer.bagua.torch_api.algorithms.base import Algorithm
from gossamer.bagua.torch_api.algorithms.native import NativeImpl
from gossamer.bagua.torch_api.data_parallel.connections import BaguaConnections
from gossamer.bagua.torch_api.data_parallel.hook_engine import HookEngine
from gossamer.bagua.torch_api.data_parallel.optimizer_state import broadcast_optimizers
from gossamer.bagua.torch_api.process_group import default_group, is_initialized
from gossamer.engine import Autotune, Engine, Tuned, UnevenInputs, autotune_of, device_of
from gossamer.errors import ConfigError


class BaguaDistributedDataParallel:
    """`model.bagua_ddp`: one model, one algorithm, one group. Not a module; held by the model, and holds it weakly.

    Args:
        module: the model, on its device.
        optimizers: its optimizers; rank 0's state is copied to the other ranks.
        algorithm: an Algorithm.
        process_group: a group of Bagua or torch, a communicator, Hierarchical(one of these), or None for all workers.
        bagua_module_name: equal on all ranks; by default its class and a number.
        gradient_as_bucket_view: do_flatten of with_bagua().
        find_unused_parameters: no effect; they need no setting.
        bucket_bytes: of a bucket; None: BAGUA_DEFAULT_BUCKET_SIZE, or 10 MiB.
        autotune: as in with_bagua().

    Raises:
        ConfigError: on every rank, if model, optimizers or algorithm differ between ranks, or cannot be trained so.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: Any = None,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        *,
        bucket_bytes: int | None = None,
        autotune: bool | Autotune | None = None,
    ) -> None:
        self.bagua_optimizers = _checked(module, optimizers, algorithm)
        self._module = weakref.ref(module)
        if process_group is None and is_initialized():
            process_group = default_group()  # whose communicators an algorithm may ask for
        self.process_group, self.do_flatten = process_group, gradient_as_bucket_view
        self.bagua_module_name = bagua_module_name if bagua_module_name is not None else _next_name(module)
        self.parameters_to_ignore = _ignored(module)
        self.bagua_algorithm = algorithm.reify(process_group)
        self.bagua_train_step_counter = 0
        self._bucket_bytes = bucket_bytes if bucket_bytes is not None else env.get_default_bucket_size()
        self._engine: Engine | HookEngine | None = None
        self._paused = contextlib.ExitStack()
        self._sync = True
        tuning = autotune_of(env.get_autotune() if autotune is None else autotune)
        if tuning is not None and not (
            isinstance(self.bagua_algorithm, NativeImpl) and self.bagua_algorithm.tunable
        ):
            raise ConfigError(
                f"autotune: needs one of the algorithms of gossamer.bagua, got {type(self.bagua_algorithm).__name__}; "
                f"unset BAGUA_AUTOTUNE, or give autotune=False"
            )
        self._connections = BaguaConnections(process_group, device_of(module))
        self._hooks: list[Any] = []
        if isinstance(self.bagua_algorithm, NativeImpl):
            self._engine = self._native_engine(module, self.bagua_algorithm, tuning)
            self.broadcast_optimizers()
        else:
            options: Any = {
                "ignore": self.parameters_to_ignore,
                "bucket_bytes": self._bucket_bytes,
            }
            self._engine = HookEngine(self, module, self._connections, **options)
            self._engine.begin()
        self._hook_into(module)

    @property
    def module(self) -> nn.Module:
        """The model."""
        alive = self._module()
        if alive is None:
            raise ConfigError("bagua: the model is gone")
        return alive

    @property
    def bagua_train_step_counter(self) -> int:
        """Forwards in training so far; the model has it as an attribute of the same name."""
        return self._train_steps

    @bagua_train_step_counter.setter
    def bagua_train_step_counter(self, count: int) -> None:
        self._train_steps = count
        self.module.bagua_train_step_counter = count  # type: ignore[assignment]

    @property
    def bagua_buckets(self) -> list[Any]:
        """The buckets as they are now; the native engine plans anew once, after the first step."""
        return self._engine.buckets if self._engine is not None else []

    @property
    def _bagua_backend(self) -> "BaguaDistributedDataParallel":
        """Where Bagua's algorithms looked for wait_pending_comm_ops()."""
        return self

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of those that are trained and not ignored, each once, under their state_dict() names."""
        ignored = set(self.parameters_to_ignore)
        named = self.module.named_parameters()
        return [(name, param) for name, param in named if param.requires_grad and name not in ignored]

    @property
    def tuned(self) -> Tuned | None:
        """What autotune ended with; None before, and without it."""
        return self._engine.tuned if isinstance(self._engine, Engine) else None

    def wait_pending_comm_ops(self) -> None:
        """For algorithms in hooks: until all buckets that have begun are done. Raises their error."""
        if isinstance(self._engine, HookEngine):
            self._engine.wait()

    def consensus(self) -> None:
        """Replaces parameters and floating-point buffers by their exact mean over the ranks. Collective."""
        if self._engine is not None:
            with torch.no_grad():
                self._engine.consensus()

    def algorithm_state_dict(self) -> dict[str, Any]:
        """As of gossamer.DataParallel. ConfigError where the algorithm is written in hooks."""
        return self.engine.state_dict()

    def load_algorithm_state_dict(self, state: dict[str, Any]) -> None:
        """As of gossamer.DataParallel. ConfigError where the algorithm is written in hooks. Collective."""
        with torch.no_grad():
            self.engine.load_state_dict(state)

    @property
    def engine(self) -> Engine:
        """The native engine. ConfigError where the algorithm is written in hooks."""
        if not isinstance(self._engine, Engine):
            raise ConfigError(
                f"bagua: {type(self.bagua_algorithm).__name__} is written in hooks, and keeps its state itself: it has "
                f"no algorithm_state_dict() and no native engine"
            )
        return self._engine

    @property
    def uneven(self) -> UnevenInputs:
        """For DistributedDataParallel.join. ConfigError where the algorithm is written in hooks."""
        if not isinstance(self._engine, Engine):
            raise ConfigError(
                f"join: {type(self.bagua_algorithm).__name__} is written in hooks, and what they do without a batch is "
                f"not known; give all ranks as many batches, by a DistributedSampler or drop_last=True"
            )
        return self._engine.uneven

    def broadcast_optimizers(self) -> None:
        """Rank 0's hyper-parameters and optimizer state, on all ranks. Collective."""
        named = dict(self.module.named_parameters())
        ignored = [id(named[name]) for name in self.parameters_to_ignore if name in named]
        comm, control = self._connections.comm, self._connections.control
        broadcast_optimizers(self.bagua_optimizers, comm=comm, control=control, ignored=ignored)

    @property
    def require_backward_grad_sync(self) -> bool:
        """False: backward only accumulates, until it is True again."""
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        if sync == self._sync or self._engine is None:
            return
        self._sync = sync
        if sync:
            self._paused.close()
        else:
            self._paused.enter_context(self._engine.no_sync())

    def close(self, *, crashed: bool = False) -> None:
        """Ends the algorithm; the model goes on alone. Idempotent. crashed: without waiting for other ranks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if isinstance(self._engine, Engine):
            self._engine.close(crashed=crashed)
        elif self._engine is not None:
            self._engine.close()

    def __reduce__(self) -> Any:
        raise ConfigError(
            "bagua: a model with an algorithm cannot be copied or pickled as a whole, because its engine belongs to "
            "this process; save its state_dict(), or copy it before with_bagua"
        )

    def _native_engine(self, module: nn.Module, impl: NativeImpl, autotune: Autotune | None) -> Engine:
        impl.use_optimizers(self.bagua_optimizers)
        links = self._connections
        engine = Engine(
            module,
            impl.native,
            comm=links.by_hosts(links.comm) if impl.by_hosts or links.always_by_hosts else links.comm,
            control=links.control,
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._bucket_bytes,
            ignore=self.parameters_to_ignore,
            autotune=autotune,
        )
        engine.watch(self.bagua_optimizers)
        return engine

    def _hook_into(self, module: nn.Module) -> None:
        this = weakref.ref(self)

        def before(module: nn.Module, inputs: Any) -> None:
            alive = this()
            if alive is not None:
                alive._before_forward(module, inputs)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            alive = this()
            if alive is not None and alive._engine is not None:
                alive._engine.after_forward(output)

        self._hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        if isinstance(self._engine, Engine):
            require = self._engine.require_same_parameters
            self._hooks.append(module.register_load_state_dict_post_hook(lambda each, _: require(each)))

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if isinstance(self._engine, HookEngine):
            self._engine.before_forward(module.training, inputs)
        elif self._engine is not None:
            self.bagua_train_step_counter += int(module.training and torch.is_grad_enabled())
            self._engine.before_forward()


_names: dict[str, int] = {}


def _next_name(module: nn.Module) -> str:
    kind = type(module).__name__
    _names[kind] = number = _names.get(kind, -1) + 1
    return f"{kind}_{number}"


def _ignored(module: nn.Module) -> list[str]:
    names: list[str] = []
    for attribute in ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore"):
        # Bagua and torch spell a parameter of the model itself ".name".
        names += [name.removeprefix(".") for name in getattr(module, attribute, [])]
    return sorted(set(names))


def _checked(module: Any, optimizers: Any, algorithm: Any) -> list[torch.optim.Optimizer]:
    if not isinstance(module, nn.Module):
        raise ConfigError(f"with_bagua: the model must be a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"with_bagua: algorithm must be an Algorithm of gossamer.bagua.torch_api.algorithms, got {algorithm!r}"
        )
    every = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in every:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"with_bagua: optimizers must be a list of torch optimizers, got {optimizer!r}")
    return every
