"""The strategy for `lightning_fabric`. Importing this registers its names."""

from typing import Any

from gossamer.lightning import fabric_strategy, names
from gossamer.lightning.namespaces import PYTORCH_LIGHTNING, subclass

_strategies = PYTORCH_LIGHTNING.of_fabric("strategies")

GossamerStrategy: Any = subclass(fabric_strategy.GossamerStrategy, _strategies.DDPStrategy, module=__name__)

names.register(_strategies.STRATEGY_REGISTRY, GossamerStrategy)
