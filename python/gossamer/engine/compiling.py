"""A mark for methods that torch.compile must not trace: native calls, and Python that differs from step to step.

The engine marks its bookkeeping before and after a forward. The graph of a compiled wrapper then breaks there, and
nowhere else.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Apply torch.compiler.disable at the first traced call, and not earlier: importing the compiler takes seconds."""
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
