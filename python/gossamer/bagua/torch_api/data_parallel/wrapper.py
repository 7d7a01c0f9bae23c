"""Bagua's DistributedDataParallel: a wrapper with the arguments of torch's, around with_bagua()."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gossamer import algorithms
from gossamer.bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, NativeAlgorithm, NativeImpl
from gossamer.bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from gossamer.bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from gossamer.bagua.torch_api.distributed import with_bagua
from gossamer.engine import Engine, Face
from gossamer.errors import ConfigError

_DEFAULT_CAP_MB = 25


class DistributedDataParallel(nn.Module, Face):
    """The model under `.module`, and its engine under `.inner`; state_dict() has the prefix "module.".

    Args:
        module: the model, on its device.
        device_ids, output_device: None, or the model's own device; "cuda" is the current one.
        dim: 0.
        broadcast_buffers: buffers are copied from rank 0 now, and never again, as in Bagua; with either value.
        bucket_cap_mb: MiB of a bucket; 25 leaves it at BAGUA_DEFAULT_BUCKET_SIZE.
        find_unused_parameters: no effect; they need no setting.
        check_reduction: False.
        gradient_as_bucket_view: do_flatten of with_bagua().
        process_group, optimizers, algorithm: as in with_bagua(); GradientAllReduceAlgorithm() by default.

    Raises:
        ConfigError: arguments that torch has and this has not; otherwise as with_bagua().
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float = _DEFAULT_CAP_MB,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm | None = None,
    ) -> None:
        super().__init__()
        Face.__init__(self)
        _check(module, device_ids, output_device, dim=dim, check_reduction=check_reduction)
        if not bucket_cap_mb > 0:
            raise ConfigError(
                f"DistributedDataParallel: bucket_cap_mb must be positive, got {bucket_cap_mb!r}"
            )
        self.module = module
        self.training: bool = module.training
        self._optimizers = optimizers
        self._options = {
            "process_group": process_group,
            "do_flatten": gradient_as_bucket_view,
            "bucket_bytes": None if bucket_cap_mb == _DEFAULT_CAP_MB else int(bucket_cap_mb * 2**20),
        }
        self._use(algorithm if algorithm is not None else GradientAllReduceAlgorithm())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.module(*args, **kwargs)

    @property
    def inner(self) -> BaguaDistributedDataParallel:
        """`module.bagua_ddp`."""
        ddp: BaguaDistributedDataParallel = self.module.bagua_ddp
        return ddp

    @property
    def engine(self) -> Engine:
        """The engine of the wrapped model."""
        return self.inner.engine

    def close(self) -> None:
        """Ends the algorithm; the model goes on alone. Idempotent."""
        self.inner.close()

    require_backward_grad_sync = BaguaDistributedDataParallel.require_backward_grad_sync
    """Whether backward communicates."""

    @property
    def parameters_to_ignore(self) -> list[str]:
        """Names that are each rank's own."""
        return self.inner.parameters_to_ignore

    @property
    def bagua_algorithm(self) -> AlgorithmImpl | NativeImpl:
        """The algorithm at work."""
        return self.inner.bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        return self.inner.bagua_optimizers

    @property
    def bagua_buckets(self) -> list[Any]:
        """The buckets as they are now."""
        return self.inner.bagua_buckets

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """torch's communication hooks, in the place of the algorithm: hook(state, bucket) -> Future. Collective.

        The hook runs on the engine's worker thread, with connections of its own choice; it averages itself.
        """
        self._use(_CommHookAlgorithm(state, hook))

    def _use(self, algorithm: Algorithm) -> None:
        with_bagua(self.module, self._optimizers, algorithm, **self._options)
        self._given_group = self.inner._given_group


class _CommHookAlgorithm(NativeAlgorithm):
    """A communication hook of torch's DistributedDataParallel as an algorithm of Bagua's."""

    tunable = False  # hooks such as PowerSGD's keep state by a bucket's index

    def __init__(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        self._state, self._hook = state, hook

    def native(self) -> algorithms.Algorithm:
        return algorithms.CommHook(self._state, self._hook)


def _check(module: Any, device_ids: Any, output_device: Any, *, dim: int, check_reduction: bool) -> None:
    if dim != 0 or check_reduction:
        raise ConfigError(
            f"DistributedDataParallel: dim must be 0 and check_reduction False, got {dim!r} and {check_reduction!r}"
        )
    own = {param.device for param in module.parameters()} if isinstance(module, nn.Module) else set()
    for name, given in (("device_ids", list(device_ids or [])), ("output_device", [output_device])):
        wanted = {_device(each, own) for each in given if each is not None}
        if len(wanted) > 1 or (wanted and wanted != own):
            raise ConfigError(
                f"DistributedDataParallel: {name} must be None or the model's own device, got {given} for a model on "
                f"{sorted(map(str, own))}"
            )


def _device(given: Any, own: set[torch.device]) -> torch.device:
    """Returns the device with an index. Without one, it is the current device, if the model is on that type."""
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    index: int | None = device.index
    if device.type == "cpu" or index is not None or device.type not in {each.type for each in own}:
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())
