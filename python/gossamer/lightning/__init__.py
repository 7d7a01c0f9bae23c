"""Strategies for Lightning's Trainer and Fabric, and Lightning's distributed utilities.

>>> from gossamer.lightning import GossamerStrategy
>>> Trainer(strategy=GossamerStrategy("bytegrad"))  # or, after import gossamer.lightning, strategy="gossamer_bytegrad"

The classes here are for `lightning.pytorch`, or for `pytorch_lightning` where that alone is installed. For Fabric:
gossamer.lightning.fabric. For the other package: gossamer.lightning.pytorch_lightning and .lightning_fabric.
"""

import importlib

from gossamer.lightning import distributed, namespaces

_MODULES = {
    namespaces.LIGHTNING: ("pytorch", "fabric"),
    namespaces.PYTORCH_LIGHTNING: ("pytorch_lightning", "lightning_fabric"),
}
_installed = namespaces.installed()

# All that are installed: a string must be known to whichever Trainer the user has imported.
for _namespace in _installed:
    for _module in _MODULES[_namespace]:
        importlib.import_module(f"{__name__}.{_module}")

_first = importlib.import_module(f"{__name__}.{_MODULES[_installed[0]][0]}")
BaguaStrategy = _first.BaguaStrategy
DDPStrategy = _first.DDPStrategy
GossamerStrategy = _first.GossamerStrategy
HorovodStrategy = _first.HorovodStrategy
ReportCallback = _first.ReportCallback

__all__ = [
    "BaguaStrategy",
    "DDPStrategy",
    "GossamerStrategy",
    "HorovodStrategy",
    "ReportCallback",
    "distributed",
]
