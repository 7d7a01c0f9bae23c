"""torch DDP's mixed_precision=: the forward runs in a 16-bit dtype; weights and optimizer keep full precision.

Parameters are cast for the duration of a forward, and autograd casts their gradients back. Torch exchanges the
parameters' memory instead, on streams that only accelerators have. The way here also works on the CPU.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gossamer.codec import BF16, FP16, Codec
from gossamer.errors import ConfigError
from gossamer.torch_private import tree_map_only

_CODECS: dict[torch.dtype, type[Codec]] = {torch.float16: FP16, torch.bfloat16: BF16}


def reduce_codec(settings: Any) -> Codec | None:
    """Return the codec of the gradients: that of `reduce_dtype`, which is `param_dtype` if not given."""
    dtype = settings.reduce_dtype or settings.param_dtype
    if dtype in (None, torch.float32):
        return None
    if dtype not in _CODECS:
        raise ConfigError(
            f"DistributedDataParallel: mixed_precision must reduce in float32, float16 or bfloat16, got {dtype}"
        )
    return _CODECS[dtype]()


def cast_buffers(settings: Any, module: nn.Module, ignore: list[str]) -> None:
    """Cast floating-point buffers in place, and do not cast them back, as torch does."""
    for name, buffer in module.named_buffers():
        if settings.buffer_dtype is not None and buffer.is_floating_point() and name not in ignore:
            buffer.data = buffer.to(settings.buffer_dtype)


def run(settings: Any, module: nn.Module, ignore: list[str], args: Any, kwargs: Any) -> Any:
    """Run module(*args, **kwargs) with parameters and inputs in `param_dtype`."""
    dtype = settings.param_dtype
    if dtype is None:
        return module(*args, **kwargs)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    params = {name: cast(param) for name, param in module.named_parameters() if name not in ignore}
    args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    return functional_call(module, params, args, kwargs)
