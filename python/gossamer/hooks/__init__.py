"""Communication hooks for stock torch DistributedDataParallel: gradients through a codec, averaged off the main thread.

>>> ddp = torch.nn.parallel.DistributedDataParallel(model)
>>> ddp.register_comm_hook(gs.hooks.State(ddp), gs.hooks.bytegrad)

See docs/hooks.md. For Gossamer's own wrapper, gs.DataParallel, algorithms take the place of hooks.
"""

from gossamer.hooks.functions import (
    HOOKS,
    bf16,
    bf16_wrapper,
    bytegrad,
    compress,
    deterministic,
    fp16,
    fp16_wrapper,
    int4,
    int8,
    onebit,
    powersgd,
    register,
)
from gossamer.hooks.state import State

globals().update(HOOKS)  # also the hooks of algorithms that a user adds to the table

__all__ = ["HOOKS", "State", "bf16_wrapper", "fp16_wrapper", "register"]
__all__ += ["bf16", "bytegrad", "compress", "deterministic", "fp16", "int4", "int8", "onebit", "powersgd"]
