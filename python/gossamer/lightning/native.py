"""GossamerStrategy: a LightningModule in gossamer.DataParallel. A mixin; see gossamer.lightning.pytorch."""

from typing import Any

from gossamer.data_parallel import DataParallel
from gossamer.lightning.choice import Chosen
from gossamer.lightning.trainer import Wrapping


class GossamerStrategy(Chosen, Wrapping):
    """Trains with one of Gossamer's algorithms, on CPUs or GPUs, with one process for each device.

    The arguments are those of Chosen.
    """

    precision_argument = "precision_plugin"

    def wrap(self, model: Any) -> DataParallel:
        return self._wrapped(model, self.optimizers)
