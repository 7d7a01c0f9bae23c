"""A model's buffers under torch DDP's names: rank 0's before a forward, or a hook that does something else with them.

Mixed into the wrapper. Which buffers travel at wrap, arguments.py says; what moves them is the engine's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.engine import broadcast_tensors, by_communicator, tensors_in
from gossamer.errors import ConfigError, UsageError
from gossamer.torch_private import BufferCommHookLocation, at_end_of_backward


class Buffers:
    """See the top of the file."""

    module: nn.Module
    engine: Any  # a property of the wrapper
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    parameters_to_ignore: list[str]
    _has_buffers: bool
    _links: Any  # the connections of the engine
    _buffer_hook: "BufferHook | None" = None

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that ranks share."""
        named = self.module.named_buffers()
        return {name: buffer for name, buffer in named if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The same without names."""
        return list(self.named_module_buffers.values())

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of forward_sync_buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, sync: bool) -> None:
        self.forward_sync_buffers = sync

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward moves buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """hook(state, {name: buffer}) in the place of the copy from rank 0, before a forward or after it.

        The futures that it returns, if any, have ended when backward has.
        """
        if not callable(hook):
            raise ConfigError(f"_register_buffer_comm_hook: hook must be callable, got {hook!r}")
        if not isinstance(comm_hook_location, BufferCommHookLocation):
            raise ConfigError(
                f"_register_buffer_comm_hook: comm_hook_location must be a _BufferCommHookLocation, got "
                f"{comm_hook_location!r}"
            )
        self._buffer_hook = BufferHook(
            state, hook, early=comm_hook_location is BufferCommHookLocation.PRE_FORWARD
        )

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """What is done without a hook, for hooks that want it too: copies these tensors from one rank. Collective.

        Args:
            bufs: None: the buffers that ranks share.
            bucket_size: has no effect.
            authoritative_rank: the rank within the group.
        """
        assert self.engine is not None  # which connects anew after unpickling
        # .data: autograd takes a buffer that it has saved for one that somebody has changed otherwise.
        tensors = [each.data for each in (self.modules_buffers if bufs is None else bufs)]
        for comm, on_device in by_communicator(self._links.comm, self._links.control, tensors):
            broadcast_tensors(comm, on_device, authoritative_rank)

    def _buffers_before_forward(self) -> None:
        if self._buffer_hook is not None:
            self._buffer_hook.wait()  # no backward may have come
        if self.will_sync_module_buffers() and (self._buffer_hook is None or self._buffer_hook.early):
            self._sync_buffers()

    def _buffers_after_forward(self, output: Any) -> None:
        if self._buffer_hook is not None:
            if self.will_sync_module_buffers() and not self._buffer_hook.early:
                self._sync_buffers()
            self._buffer_hook.watch(output)

    def _sync_buffers(self) -> None:
        hook = self._buffer_hook
        if hook is not None and self.engine.uneven.copies_buffers:
            raise UsageError(
                "join: ranks without a batch cannot take part in the hook of _register_buffer_comm_hook(); wrap with "
                "forward_sync_buffers=False, or make the numbers of batches equal"
            )
        with torch.no_grad():
            self.engine.sync_buffers(None if hook is None else lambda: hook.run(self.named_module_buffers))


class BufferHook:
    """One registered hook, and the futures that it has returned.

    Args:
        early: before the forward.
    """

    def __init__(self, state: Any, hook: Callable[[Any, dict[str, Tensor]], Any], *, early: bool) -> None:
        self._state, self._hook, self.early = state, hook, early
        self._futures: list[Any] = []

    def run(self, buffers: dict[str, Tensor]) -> None:
        """Calls the hook."""
        self._futures += self._hook(self._state, buffers) or []

    def wait(self) -> None:
        """For the futures."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def watch(self, output: Any) -> None:
        """The backward of this output waits for the futures."""
        if self._futures and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: at_end_of_backward(self.wait))
