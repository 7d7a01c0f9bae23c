"""Strategies and a callback for the Trainer of `pytorch_lightning`. Importing this registers their names."""

from gossamer.lightning.names import for_trainer
from gossamer.lightning.namespaces import PYTORCH_LIGHTNING

_made = for_trainer(PYTORCH_LIGHTNING, __name__)
BaguaStrategy, DDPStrategy, GossamerStrategy, HorovodEnvironment, HorovodStrategy, ReportCallback = _made
