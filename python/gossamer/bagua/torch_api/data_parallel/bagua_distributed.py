"""What a model gets by with_bagua(): its algorithm, and the engine that carries it out."""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn

from gossamer import _C
from gossamer.bagua.hooked.algorithm import HookAlgorithm
from gossamer.bagua.torch_api import env
from gossamer.bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, NativeImpl
from gossamer.bagua.torch_api.data_parallel.optimizer_state import broadcast_optimizers
from gossamer.bagua.torch_api.process_group import default_group, is_initialized, torch_group_of
from gossamer.comm import KINDS, Flat, Hierarchical, given_group
from gossamer.engine import Autotune, Face, autotune_of, weak_call
from gossamer.errors import ConfigError

_numbers: dict[str, "count[int]"] = defaultdict(count)  # of models without a name, by class


class BaguaDistributedDataParallel(Face):
    """`model.bagua_ddp`: one model, one algorithm, one group. Not a module; held by the model, and holds it weakly.

    Args:
        module: the model, on its device.
        optimizers, algorithm, process_group, bucket_bytes, autotune: as in with_bagua(), which has the errors too.
        bagua_module_name: equal on all ranks; by default its class and a number.
        gradient_as_bucket_view: do_flatten of with_bagua().
        find_unused_parameters: no effect; they need no setting.
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
        super().__init__()
        self.bagua_optimizers: list[torch.optim.Optimizer] = _checked(module, optimizers, algorithm)
        self._module = weakref.ref(module)
        if process_group is None and is_initialized():
            process_group = default_group()  # whose communicators an algorithm may ask for
        self.process_group = process_group
        self.do_flatten: bool = gradient_as_bucket_view
        kind = type(module).__name__
        self.bagua_module_name: str = bagua_module_name or f"{kind}_{next(_numbers[kind])}"
        self.parameters_to_ignore: list[str] = _ignored(module)
        self.bagua_algorithm: AlgorithmImpl | NativeImpl = algorithm.reify(process_group)
        self.bagua_train_step_counter = 0
        tuning = autotune_of(env.get_autotune() if autotune is None else autotune)
        if tuning is not None and not getattr(algorithm, "tunable", False):
            untunable = getattr(self.bagua_algorithm, "native", self.bagua_algorithm)
            raise ConfigError(
                f"autotune: needs one of the algorithms of gossamer.bagua, got {type(untunable).__name__}; "
                f"unset BAGUA_AUTOTUNE, or give autotune=False"
            )
        group = torch_group_of("with_bagua", given_group(process_group))
        if isinstance(process_group, KINDS):
            group = replace(process_group, group=group)
        elif getattr(algorithm, "by_hosts", False):
            group = Hierarchical(group)
        else:
            group = Flat(group, host_memory=True)  # sums go in one level, as Bagua's
        size = bucket_bytes if bucket_bytes is not None else env.get_default_bucket_size()
        self._hooked: HookAlgorithm | None = None
        if isinstance(self.bagua_algorithm, NativeImpl):
            self.bagua_algorithm.require_optimizers(self.bagua_optimizers)
            native = self.bagua_algorithm.native
        else:
            native = self._hooked = HookAlgorithm(self, self.bagua_algorithm, bucket_bytes=size)
        settings = {"bucket_bytes": size, "first_bucket_bytes": size, "ignore": self.parameters_to_ignore}
        try:
            self._wrap(native, group, self.bagua_optimizers, autotune=tuning, **settings)
            self.broadcast_optimizers()
            if self._hooked is not None:
                self._hooked.begin()
        except BaseException:  # nobody else can close it, and it would refuse a second try
            super().close()
            raise
        before, after = (
            weak_call(weakref.WeakMethod(moment)) for moment in (self._before_forward, self._after_forward)
        )
        require = self.engine.require_same_parameters
        self._module_hooks: list[Any] = [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
            module.register_load_state_dict_post_hook(lambda each, _: require(each)),
        ]

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
        """The current buckets. Those of a built-in algorithm are planned again once, after the first step."""
        return self._hooked.buckets if self._hooked is not None else self.engine.buckets

    @property
    def _bagua_backend(self) -> "BaguaDistributedDataParallel":
        """The object on which Bagua's algorithms call wait_pending_comm_ops(): this one."""
        return self

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """Returns (name, parameter) of trained parameters that are not ignored, each once, with state_dict() names."""
        ignored = set(self.parameters_to_ignore)
        named = self.module.named_parameters()
        return [(name, param) for name, param in named if param.requires_grad and name not in ignored]

    def wait_pending_comm_ops(self) -> None:
        """Waits until all buckets that have begun are done, for an algorithm in hooks. Raises their error."""
        if self._hooked is not None:
            self._hooked.wait()

    def broadcast(self) -> None:
        """Copies rank 0's parameters, buffers and optimizer state to the other ranks, in place. Collective."""
        self.engine.broadcast()
        self.broadcast_optimizers()

    def broadcast_optimizers(self) -> None:
        """Copies rank 0's hyper-parameters and optimizer state to the other ranks. Collective."""
        named = dict(self.module.named_parameters())
        ignored = [id(named[name]) for name in self.parameters_to_ignore if name in named]
        broadcast_optimizers(self.bagua_optimizers, self.links, ignored)

    @property
    def require_backward_grad_sync(self) -> bool:
        """False: backward only accumulates, until it is True again."""
        return self.engine.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self.engine.sync = sync

    def close(self, *, crashed: bool = False) -> None:
        """Ends the algorithm; the model goes on alone. Idempotent. crashed: without waiting for other ranks."""
        for hook in self._module_hooks:
            hook.remove()
        self._module_hooks.clear()
        self.engine.close(crashed=crashed)

    def __reduce__(self) -> Any:
        raise ConfigError(
            "bagua: a model that has had an algorithm cannot be copied or pickled as a whole, even after close(), "
            "because its engine belongs to this process; save its state_dict(), or copy it before with_bagua"
        )

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not self.engine.is_open:  # another wrapper has taken the model over
            return
        counts = module.training and torch.is_grad_enabled() and not _C.inside_backward()
        self.bagua_train_step_counter += int(counts)
        self.engine.before_forward()
        if self._hooked is not None:
            self._hooked.enter_forward(inputs, training=counts)

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self.engine.is_open:
            self.engine.after_forward(output)


def _ignored(module: nn.Module) -> list[str]:
    attributes = "_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore"
    names = (name for attribute in attributes for name in getattr(module, attribute, []))
    return sorted({name.removeprefix(".") for name in names})  # Bagua and torch call the model's own ".name"


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
