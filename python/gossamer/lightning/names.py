"""The strings that Trainer(strategy="...") and Fabric(strategy="...") take once gossamer.lightning is imported."""

from typing import Any

from gossamer.algorithms import ALGORITHMS

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
# Unused parameters need no setting; the endings are those of "ddp".
_ENDINGS = ("", "_find_unused_parameters_false", "_find_unused_parameters_true")


def register(registry: Any, strategy: Any) -> None:
    """gossamer, gossamer_bytegrad, ... with each way to start processes and each ending; again replaces them."""
    algorithms = {"gossamer": "gradient_allreduce", **{f"gossamer_{name}": name for name in ALGORITHMS}}
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
