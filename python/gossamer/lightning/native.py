"""GossamerStrategy: a LightningModule in gossamer.DataParallel. A mixin; see gossamer.lightning.pytorch."""

from typing import Any

from torch import Tensor

from gossamer.algorithms import Algorithm
from gossamer.data_parallel import DataParallel
from gossamer.errors import ConfigError
from gossamer.lightning.choice import Chosen
from gossamer.lightning.manual import before_backward
from gossamer.lightning.trainer import Wrapping


class GossamerStrategy(Chosen, Wrapping):
    """Trains with one of Gossamer's algorithms, on CPUs or GPUs; one process for each device. Arguments: see Chosen."""

    precision_argument = "precision_plugin"

    def wrap(self, model: Any) -> DataParallel:
        return self._choice.wrap(model, self.optimizers)

    def unwrap(self, wrapper: Any, *, crashed: bool) -> None:
        wrapper.engine.close(crashed=crashed)

    @property
    def running(self) -> Algorithm:
        """The Algorithm at work, during fit()."""
        if self.wrapper is None:
            raise ConfigError("GossamerStrategy: an algorithm is at work during fit() only")
        algorithm: Algorithm = self.wrapper.algorithm
        return algorithm

    def abort(self, wrapper: Any) -> None:
        if hasattr(wrapper.algorithm, "abort"):
            wrapper.algorithm.abort()

    def resume(self, wrapper: Any) -> None:
        if hasattr(wrapper.algorithm, "resume"):
            wrapper.algorithm.resume()

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self.wrapper is not None:
            before_backward(self.lightning_module, self.wrapper.engine, closure_loss)
