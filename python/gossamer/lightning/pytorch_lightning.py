"""Strategies for the Trainer of `pytorch_lightning`. Importing this registers their names."""

from typing import Any

from gossamer.lightning import bagua, names, native, stock
from gossamer.lightning.namespaces import PYTORCH_LIGHTNING, subclass

_strategies = PYTORCH_LIGHTNING.of_trainer("strategies")
_misconfiguration = PYTORCH_LIGHTNING.of_fabric("utilities.exceptions").MisconfigurationException

GossamerStrategy: Any = subclass(native.GossamerStrategy, _strategies.DDPStrategy, module=__name__)
DDPStrategy: Any = subclass(stock.DDPStrategy, _strategies.DDPStrategy, module=__name__)
BaguaStrategy: Any = subclass(
    bagua.BaguaStrategy,
    _strategies.DDPStrategy,
    module=__name__,
    extra={"misconfiguration": _misconfiguration},
)

names.register(_strategies.StrategyRegistry, GossamerStrategy)
_strategies.StrategyRegistry.register(
    "bagua", BaguaStrategy, description="Bagua's algorithms, over Gossamer", override=True
)
