"""with_bagua(): a model and an algorithm, in place. The engine is data_parallel/bagua_distributed.py."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from gossamer.bagua.torch_api.algorithms.base import Algorithm
from gossamer.bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from gossamer.engine import Autotune

Model = TypeVar("Model", bound=nn.Module)
#: What a model has of its bagua_ddp.
_ATTRIBUTES = (
    "bagua_module_name",
    "bagua_algorithm",
    "bagua_optimizers",
    "bagua_build_params",
    "parameters_to_ignore",
)


class _Buckets(Sequence[Any]):
    """The buckets of a model, as they are at the time of each access."""

    def __init__(self, ddp: BaguaDistributedDataParallel) -> None:
        self._ddp = ddp

    def __len__(self) -> int:
        return len(self._ddp.bagua_buckets)

    def __getitem__(self, index: Any) -> Any:
        return self._ddp.bagua_buckets[index]


def with_bagua(
    model: Model,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    process_group: Any = None,
    do_flatten: bool = True,
    *,
    bucket_bytes: int | None = None,
    autotune: bool | Autotune | None = None,
) -> Model:
    """Gives the model an algorithm, and returns the model itself: no wrapper, no prefix in state_dict(). Collective.

    Parameters, buffers and optimizer state are copied from rank 0, now. Again with another algorithm replaces the
    first. The model gets the attributes bagua_ddp, bagua_algorithm, bagua_optimizers, bagua_buckets,
    bagua_build_params, bagua_train_step_counter, parameters_to_ignore and bagua_module_name (kept if it was set
    before); names in `model._bagua_params_and_buffers_to_ignore` and `model._ddp_params_and_buffers_to_ignore` are
    each rank's own.

    Args:
        optimizers: all optimizers of the model's parameters.
        process_group: a group of Bagua or torch, a communicator, or None for all workers; or Flat, Hierarchical,
            HostMemory or Symmetric of gossamer around one of these.
        do_flatten: for algorithms in hooks, whether their buckets move tensors together; built-in ones always do.
        bucket_bytes: bytes that travel together; None: BAGUA_DEFAULT_BUCKET_SIZE, or 10 MiB.
        autotune: as in gossamer.DataParallel; None: whether BAGUA_AUTOTUNE is above 0. What it ends with is
            `model.bagua_ddp.tuned`.

    Raises:
        ConfigError: on every rank, if models, optimizers or algorithms differ between ranks or cannot be trained so.
    """
    before = getattr(model, "bagua_ddp", None)
    if before is not None:
        before.close()
    name = getattr(model, "bagua_module_name", None)
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "autotune": autotune}
    ddp = BaguaDistributedDataParallel(
        model, optimizers, algorithm, process_group, name, do_flatten, **options
    )
    attributes = {name: getattr(ddp, name) for name in _ATTRIBUTES}
    for name, value in {"bagua_ddp": ddp, "bagua_buckets": _Buckets(ddp), **attributes}.items():
        setattr(model, name, value)
    return model
