"""What torch.compile must not trace: native calls, and Python that does something else in every step.

The engine's bookkeeping around a forward is marked so. A compiled wrapper then breaks its graph before and after the
model, and nowhere else.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compiler.disable, at the first call that is being traced: it imports the compiler, which takes seconds."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if not torch.compiler.is_compiling():
                return method(*arguments)
            disabled = torch.compiler.disable(method)
        return disabled(*arguments)

    return call
