"""Algorithm and AlgorithmImpl: the declaration of an algorithm, and the algorithm at work in one model.

An algorithm that was written for Bagua subclasses both classes. gossamer.bagua.hooked calls the hooks. Bagua's own
algorithms, which run on Gossamer's native engine, subclass NativeAlgorithm. A new algorithm is shorter as a
gossamer.Algorithm.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gossamer import algorithms
from gossamer.bagua.torch_api.bucket import BaguaBucket
from gossamer.bagua.torch_api.tensor import (
    bagua_ensure_grad,
    bagua_mark_communication_ready,
    ensure_bagua_tensor,
    is_bagua_tensor,
)
from gossamer.errors import ConfigError


class Algorithm:
    """Declares an algorithm: its settings, no state. Several models may be given one object."""

    def reify(self, process_group: Any) -> Any:
        """Returns the algorithm at work in one model. process_group: what with_bagua() was given; None: all workers."""
        raise NotImplementedError(f"{type(self).__name__} must define reify")

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> "Algorithm":
        """Makes the algorithm that is registered under `name`, with these arguments. KeyError if there is none."""
        return GlobalAlgorithmRegistry.get(name)(**kwargs)


class AlgorithmImpl:
    """The hooks of a step. By default gradients fill buckets, and a bucket has no operations.

    Each init_..._hook returns a hook. It is called whenever the buckets are made. `bagua_ddp` is the model's
    BaguaDistributedDataParallel.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """Asked before each training forward; all ranks must answer alike.

        True: rank 0's values are copied, and tensors, buckets, operations and hooks are made anew.
        """
        return False

    def init_tensors(self, bagua_ddp: Any) -> list[Tensor]:
        """The Bagua tensors to put in buckets, in the order in which they become ready. It is the same on all ranks."""
        gradient, put = attrgetter("grad"), lambda param, value: setattr(param, "grad", value)
        return [
            ensure_bagua_tensor(bagua_ensure_grad(param), name, bagua_ddp.bagua_module_name, gradient, put)
            for name, param in reversed(bagua_ddp.bagua_build_params())
        ]

    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """The buckets, in the order in which they travel. `tensors`: a suggestion, by dtype, device and size."""
        return [
            BaguaBucket(group, name=str(index), flatten=do_flatten) for index, group in enumerate(tensors)
        ]

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        """Appends operations to the bucket."""

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        """Returns f(inputs), which is called before each training forward."""
        return lambda inputs: None

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, Tensor], None]:
        """Returns f(name, param), which is called when the gradient of a parameter is complete.

        For a parameter without gradient it is called at the end of the backward.
        """
        return lambda name, param: bagua_mark_communication_ready(param) if is_bagua_tensor(param) else None

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]:
        """Returns f(), which is called at the end of each backward."""
        wait: Callable[[], None] = bagua_ddp.wait_pending_comm_ops
        return wait

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        """Returns f(optimizer), which is called after each step of each optimizer."""
        return lambda optimizer: None


class NativeImpl:
    """A built-in algorithm at work in one model; `model.bagua_algorithm`. Not an AlgorithmImpl: it has no hooks.

    `declared` has its settings. `native` is gossamer's algorithm, which runs on the native engine.
    """

    def __init__(self, process_group: Any, declared: Any) -> None:
        self.process_group = process_group
        self.declared = declared
        self.native: algorithms.Algorithm = declared.native()

    def require_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """ConfigError unless the algorithm can work with the optimizers that with_bagua() was given."""
        if self.native.needs_optimizer and not optimizers:
            raise ConfigError(f"with_bagua: {self.native!r} counts optimizer steps; give the optimizers")


class NativeAlgorithm(Algorithm):
    """Declares a NativeImpl."""

    hierarchical: bool
    by_hosts: bool = False  # sums go inside hosts first and then across, where the codec is
    tunable = True  # by BAGUA_AUTOTUNE; gossamer's algorithm may refuse it still
    impl = NativeImpl

    def native(self) -> algorithms.Algorithm:
        """A new one of gossamer's algorithms, with these settings."""
        raise NotImplementedError

    def reify(self, process_group: Any) -> NativeImpl:
        return self.impl(process_group, self)


class _Registry:
    """Algorithms by name."""

    def __init__(self) -> None:
        self._algorithms: dict[str, Callable[..., Algorithm]] = {}

    def register(
        self, name: str, algorithm: Callable[..., Algorithm], description: str | None = None
    ) -> None:
        """Adds an algorithm. ValueError if the name is taken. `description` has no effect."""
        if name in self._algorithms:
            raise ValueError(f"GlobalAlgorithmRegistry: '{name}' is registered already")
        self._algorithms[name] = algorithm

    def get(self, name: str) -> Callable[..., Algorithm]:
        """The class of that name. KeyError if there is none."""
        if name not in self._algorithms:
            raise KeyError(
                f"GlobalAlgorithmRegistry: must be one of {', '.join(self.available_algorithms())}, got {name!r}"
            )
        return self._algorithms[name]

    def available_algorithms(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._algorithms)


GlobalAlgorithmRegistry: _Registry = _Registry()
"""The algorithms by the names that `Algorithm.init` takes."""
