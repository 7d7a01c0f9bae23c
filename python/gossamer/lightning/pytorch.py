"""Strategies and a callback for the Trainer of `lightning.pytorch`. Importing this registers their names."""

from gossamer.lightning.names import for_trainer
from gossamer.lightning.namespaces import LIGHTNING

_made = for_trainer(LIGHTNING, __name__)
BaguaStrategy, DDPStrategy, GossamerStrategy, HorovodEnvironment, HorovodStrategy, ReportCallback = _made
