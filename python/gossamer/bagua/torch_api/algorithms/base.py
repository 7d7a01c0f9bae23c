"""Algorithm and AlgorithmImpl: the declaration of an algorithm, and the algorithm at work in one model.

An algorithm that was written for Bagua subclasses both classes. gossamer.bagua.hooked calls the hooks.
A new algorithm is shorter as a gossamer.Algorithm.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.bagua.torch_api.bucket import BaguaBucket
from gossamer.bagua.torch_api.tensor import (
    bagua_ensure_grad,
    bagua_mark_communication_ready,
    ensure_bagua_tensor,
    is_bagua_tensor,
)

if TYPE_CHECKING:
    from gossamer.bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel


class Algorithm:
    """Declares an algorithm: its settings, no state. Several models may be given one object."""

    def reify(self, process_group: Any) -> Any:
        """Returns the algorithm at work in one model. process_group: what with_bagua() was given; None: all workers."""
        raise NotImplementedError(f"{type(self).__name__} must define reify")

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> "Algorithm":
        """Makes the algorithm that is registered under `name`, with these arguments. KeyError if there is none."""
        algorithm = GlobalAlgorithmRegistry.get(name)(**kwargs)
        assert isinstance(algorithm, Algorithm)
        return algorithm


class AlgorithmImpl:
    """The hooks of a step. By default gradients fill buckets, and a bucket has no operations.

    Each init_..._hook returns a hook. It is called whenever the buckets are made.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """Asked before each training forward; all ranks must answer alike.

        True: rank 0's values are copied, and tensors, buckets, operations and hooks are made anew.
        """
        return False

    def init_tensors(self, bagua_ddp: "BaguaDistributedDataParallel") -> list[Tensor]:
        """The Bagua tensors to put in buckets, in the order in which they become ready. It is the same on all ranks."""
        tensors = []
        for name, param in reversed(bagua_ddp.bagua_build_params()):
            bagua_ensure_grad(param)
            tensors.append(
                ensure_bagua_tensor(param, name, bagua_ddp.bagua_module_name, _gradient, _set_gradient)
            )
        return tensors

    def tensors_to_buckets(self, tensors: list[list[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """The buckets, in the order in which they travel. `tensors`: a suggestion, by dtype, device and size."""
        return [
            BaguaBucket(group, name=str(index), flatten=do_flatten) for index, group in enumerate(tensors)
        ]

    def init_operations(self, bagua_ddp: "BaguaDistributedDataParallel", bucket: BaguaBucket) -> None:
        """Appends operations to the bucket."""

    def init_forward_pre_hook(self, bagua_ddp: "BaguaDistributedDataParallel") -> Callable[[Any], None]:
        """Returns f(inputs), which is called before each training forward."""
        return lambda inputs: None

    def init_backward_hook(self, bagua_ddp: "BaguaDistributedDataParallel") -> Callable[[str, Tensor], None]:
        """Returns f(name, param), which is called when the gradient of a parameter is complete.

        For a parameter without gradient it is called at the end of the backward.
        """

        def hook(name: str, param: Tensor) -> None:
            if is_bagua_tensor(param):
                bagua_mark_communication_ready(param)

        return hook

    def init_post_backward_hook(self, bagua_ddp: "BaguaDistributedDataParallel") -> Callable[[], None]:
        """Returns f(), which is called at the end of each backward."""
        return bagua_ddp.wait_pending_comm_ops

    def init_post_optimizer_step_hook(
        self, bagua_ddp: "BaguaDistributedDataParallel"
    ) -> Callable[[Any], None]:
        """Returns f(optimizer), which is called after each step of each optimizer."""
        return lambda optimizer: None


class _Registry:
    """Algorithms by name."""

    def __init__(self) -> None:
        self._algorithms: dict[str, tuple[Callable[..., Algorithm], str]] = {}

    def register(
        self, name: str, algorithm: Callable[..., Algorithm], description: str | None = None
    ) -> None:
        """Adds an algorithm. ValueError if the name is taken."""
        if name in self._algorithms:
            raise ValueError(f"GlobalAlgorithmRegistry: '{name}' is registered already")
        self._algorithms[name] = (algorithm, description or "")

    def get(self, name: str) -> Callable[..., Algorithm]:
        """The class of that name. KeyError if there is none."""
        if name not in self._algorithms:
            raise KeyError(
                f"GlobalAlgorithmRegistry: must be one of {', '.join(self.available_algorithms())}, got {name!r}"
            )
        return self._algorithms[name][0]

    def available_algorithms(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._algorithms)


GlobalAlgorithmRegistry = _Registry()
"""The algorithms by the names that `Algorithm.init` takes."""


def _gradient(param: Tensor) -> Any:
    return param.grad


def _set_gradient(param: Tensor, value: Tensor) -> None:
    param.grad = value
