"""Bagua's asynchronous model averaging, as gossamer.AsyncModelAverage."""

from torch import nn

from gossamer import algorithms
from gossamer.bagua.hooked.operations import require_peers
from gossamer.bagua.torch_api.algorithms.base import NativeAlgorithm, NativeImpl
from gossamer.errors import ConfigError


class AsyncModelAverageImpl(NativeImpl):
    """Asynchronous averaging at work in one model."""

    native: algorithms.AsyncModelAverage

    def abort(self, model: nn.Module) -> None:
        """From now on this rank's weights are neither averaged nor changed, and it only answers the others."""
        self._require(model)
        self.native.abort()

    def resume(self, model: nn.Module) -> None:
        """Takes part again."""
        self._require(model)
        self.native.resume()

    def _require(self, model: nn.Module) -> None:
        if getattr(model, "bagua_algorithm", None) is not self:
            raise ConfigError(
                "AsyncModelAverageAlgorithm: abort and resume need the model whose algorithm this is"
            )


class AsyncModelAverageAlgorithm(NativeAlgorithm):
    """Ranks train on their own; their weights are averaged in the background.

    Args:
        peer_selection_mode: "all".
        sync_interval_ms: milliseconds from the end of a round to the next.
        warmup_steps: steps with averaged gradients first.
    """

    impl = AsyncModelAverageImpl

    def __init__(
        self, peer_selection_mode: str = "all", sync_interval_ms: float = 500, warmup_steps: int = 0
    ) -> None:
        require_peers("AsyncModelAverageAlgorithm", peer_selection_mode, "all")
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms: float = sync_interval_ms
        self.warmup_steps: int = warmup_steps
        self.native()

    def native(self) -> algorithms.AsyncModelAverage:
        return algorithms.AsyncModelAverage(self.sync_interval_ms, self.warmup_steps)
