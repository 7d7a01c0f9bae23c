"""Communication hooks for stock torch DistributedDataParallel: gradients through a codec, averaged off the main thread.

>>> ddp = torch.nn.parallel.DistributedDataParallel(model)
>>> ddp.register_comm_hook(gs.hooks.State(ddp), gs.hooks.bytegrad)

See docs/hooks.md. For Gossamer's own wrapper, gs.DataParallel, algorithms take the place of hooks.
"""

from typing import TYPE_CHECKING

from gossamer.hooks.functions import HOOKS, Hook, register
from gossamer.hooks.state import State
from gossamer.hooks.wrappers import bf16_wrapper, fp16_wrapper

globals().update(HOOKS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Hook: ...


__all__ = ["HOOKS", "State", "bf16_wrapper", "fp16_wrapper", "register", *HOOKS]
