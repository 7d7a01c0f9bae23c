"""One hook of _register_buffer_comm_hook(), and the futures that it has returned."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.engine import tensors_in
from gossamer.errors import ConfigError
from gossamer.torch_private import BufferCommHookLocation, at_end_of_backward


class BufferHook:
    """Calls hook(state, {name: buffer}) in place of the copy from rank 0.

    `early` says that the hook is called before a forward, and not after it.

    Raises:
        ConfigError: the hook is not callable, or the location is no _BufferCommHookLocation of torch.
    """

    def __init__(self, state: Any, hook: Callable[[Any, dict[str, Tensor]], Any], location: Any) -> None:
        if not callable(hook):
            raise ConfigError(f"_register_buffer_comm_hook: hook must be callable, got {hook!r}")
        if not isinstance(location, BufferCommHookLocation):
            raise ConfigError(
                f"_register_buffer_comm_hook: comm_hook_location must be a _BufferCommHookLocation, got {location!r}"
            )
        self._state, self._hook = state, hook
        self.early: bool = location is BufferCommHookLocation.PRE_FORWARD
        self._futures: list[Any] = []

    def run(self, buffers: dict[str, Tensor]) -> None:
        """Call the hook, and keep the futures that it returns."""
        self._futures += self._hook(self._state, buffers) or []

    def wait(self) -> None:
        """Wait for the futures."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def watch(self, output: Any) -> None:
        """Let the backward of this output wait for the futures."""
        if self._futures and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: at_end_of_backward(self.wait))
