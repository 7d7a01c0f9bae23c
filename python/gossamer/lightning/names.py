"""Makes the classes for one Lightning package, and registers the strings for Trainer(strategy="...") and Fabric.

pytorch.py, pytorch_lightning.py, fabric.py and lightning_fabric.py call it when they are imported.
"""

from typing import Any

from gossamer.algorithms import ALGORITHMS, Sharded
from gossamer.lightning import bagua, fabric_strategy, horovod, horovod_environment, native, reports, stock
from gossamer.lightning.namespaces import Namespace, subclass
from gossamer.lightning.refusals import Refusals

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
# The endings of "ddp". Unused parameters need no setting here.
_ENDINGS = ("", "_find_unused_parameters_false", "_find_unused_parameters_true")


def for_trainer(namespace: Namespace, module: str) -> list[Any]:
    """Make and register the classes for one Trainer. Return them in alphabetical order.

    Args:
        module: the module that will hold the classes, as pickle needs it.
    """
    strategies = namespace.of_trainer("strategies")
    base, registry = strategies.DDPStrategy, strategies.StrategyRegistry
    error = namespace.of_fabric("utilities.exceptions").MisconfigurationException
    environments = namespace.of_fabric("plugins.environments")
    hosts = subclass(horovod_environment.HorovodEnvironment, environments.ClusterEnvironment, module=module)
    baguas = subclass(bagua.BaguaStrategy, base, module=module, extra={"misconfiguration": error})
    stocks = subclass(stock.DDPStrategy, base, module=module)
    natives = subclass(native.GossamerStrategy, base, module=module)
    horovods = subclass(horovod.HorovodStrategy, base, module=module, extra={"environment": hosts})
    callback = subclass(reports.ReportCallback, namespace.of_trainer("callbacks").Callback, module=module)
    _register(registry, natives)
    for name, strategy in (("bagua", baguas), ("horovod", horovods)):
        registry.register(name, strategy, description=f"{name.title()}'s, over Gossamer", override=True)
    classes = tuple(each.__name__ for each in (baguas, stocks, natives, horovods))
    refusals = Refusals(namespace.trainer, strategies.Strategy, registry, module, classes)
    refusals.wrap(namespace.of_trainer("trainer.connectors.accelerator_connector")._AcceleratorConnector)
    return [baguas, stocks, natives, hosts, horovods, callback]


def for_fabric(namespace: Namespace, module: str) -> Any:
    """Make and register the strategy for one Fabric.

    Args:
        module: the module that will hold the class, as pickle needs it.
    """
    strategies = namespace.of_fabric("strategies")
    made = subclass(fabric_strategy.GossamerStrategy, strategies.DDPStrategy, module=module)
    registry = strategies.STRATEGY_REGISTRY
    _register(registry, made)
    refusals = Refusals(namespace.fabric, strategies.Strategy, registry, module, (made.__name__,))
    refusals.wrap(namespace.of_fabric("connector")._Connector)
    return made


def _register(registry: Any, strategy: Any) -> None:
    """Register gossamer, gossamer_bytegrad, ... with each way to start processes and each ending."""
    names = [name for name, kind in ALGORITHMS.items() if kind is not Sharded]  # which the strategy refuses
    algorithms = {"gossamer": "gradient_allreduce", **{f"gossamer_{name}": name for name in names}}
    for prefix, algorithm in algorithms.items():
        for way, start_method in _START_METHODS.items():
            for ending in _ENDINGS:
                registry.register(
                    prefix + way + ending,
                    strategy,
                    description=f"Gossamer's {algorithm}, with `start_method` '{start_method}'",
                    override=True,
                    algorithm=algorithm,
                    start_method=start_method,
                )
