"""Which models can be trained this way, and how a model is described to the other ranks. Pure checks, no collective.

A refusal is returned, not raised: engine.py lets all ranks compare notes first, so that all of them raise.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gossamer.comm import Communicator
from gossamer.errors import ConfigError

_TRAINABLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def describe(module: nn.Module) -> list[str]:
    """One line for each parameter and buffer; ranks that train together have equal lines."""
    parameters = [
        f"parameter {name} {_shape(param)} {param.dtype} {'trainable' if param.requires_grad else 'frozen'}"
        for name, param in module.named_parameters()
    ]
    return parameters + [
        f"buffer {name} {_shape(buffer)} {buffer.dtype}" for name, buffer in module.named_buffers()
    ]


def refusal_of(
    module: nn.Module, comm: Communicator, wrapped: Iterable[tuple[Communicator, Sequence[Tensor]]]
) -> ConfigError | None:
    """Why this rank cannot train this model over `comm`, or None.

    Args:
        wrapped: the communicator and the parameters of each model that is wrapped now.
    """
    named = list(module.named_parameters())
    reasons = [
        *_of_the_whole(named),
        *_of_other_models(named, comm, wrapped),
        *(reason for name, param in named for reason in _of_a_parameter(name, param, comm.device)),
        *_of_sparse_modules(module),
    ]
    return ConfigError(f"engine: {reasons[0]}") if reasons else None


def _of_the_whole(named: list[tuple[str, nn.Parameter]]) -> Iterable[str]:
    if not any(param.requires_grad for _, param in named):
        yield "the model has no parameter with requires_grad=True, nothing to train"


def _of_other_models(
    named: list[tuple[str, nn.Parameter]],
    comm: Communicator,
    wrapped: Iterable[tuple[Communicator, Sequence[Tensor]]],
) -> Iterable[str]:
    for other_comm, other_params in wrapped:
        if other_comm is comm:
            yield (
                "this communicator serves another model already, and their traffic would mix; "
                "pass a process group, or a communicator of its own"
            )
        known = {id(param) for param in other_params}
        for name, param in named:
            if id(param) in known:
                yield f"parameter '{name}' belongs to a model that is wrapped already; close() that first"


def _of_a_parameter(name: str, param: Tensor, device: torch.device) -> Iterable[str]:
    what = f"parameter '{name}'"
    if hasattr(param, "device_mesh"):
        yield f"{what} is a DTensor (FSDP or tensor parallel), which has its own reduction"
    if nn.parameter.is_lazy(param):
        yield f"{what} is not initialised yet; run one forward before wrapping the model"
    if not param.requires_grad:
        return
    if param.dtype not in _TRAINABLE_DTYPES:
        yield f"{what} must be float32, float64, float16 or bfloat16 to be trained, got {param.dtype}"
    if param.device.type != device.type or (device.index is not None and param.device != device):
        yield f"{what} is on {param.device}, but this model's gradients travel from {device}"


def _of_sparse_modules(module: nn.Module) -> Iterable[str]:
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) is True and getattr(child, "weight", None) is not None:
            yield (
                f"module '{name}' ({type(child).__name__}) makes sparse gradients, which are not "
                f"supported yet; build it with sparse=False"
            )


def _shape(tensor: Tensor) -> str:
    return "uninitialised" if nn.parameter.is_lazy(tensor) else str(list(tensor.shape))
