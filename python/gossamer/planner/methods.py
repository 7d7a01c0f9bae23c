# The table of what the planner compares: the methods that the algorithms list, and their peers in stock torch.
# Nothing is computed here. Callers: predict.py, advice.py and the command.
"""Methods by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gossamer.algorithms import ALGORITHMS
from gossamer.errors import ConfigError
from gossamer.facts import APART, COMPRESSED, EXACT, ROUNDED, Method, Settings


@dataclass(frozen=True)
class Stock:
    """torch's DistributedDataParallel, with one of torch's communication hooks.

    Args:
        hook: None, "fp16", "powersgd" or "post_local_sgd".
        rank: columns of PowerSGD's factors.
        period: steps between two averagings of post-local SGD.
    """

    hook: str | None = None
    rank: int = 4
    period: int = 10


def _stock(name: str, hook: str | None, kind: str, changes: str, page: str = "hooks.md") -> Method:
    make: Callable[[Settings], Stock] = lambda settings: Stock(hook, settings.rank, settings.period)  # noqa: E731
    return Method(name, make, kind, changes, page, advised=False)


_STOCK = (
    _stock("ddp", None, EXACT, "is torch's own", "ddp.md"),
    _stock("ddp_fp16_hook", "fp16", ROUNDED, "sums gradients in float16"),
    _stock("ddp_powersgd_hook", "powersgd", COMPRESSED, "sends two thin factors of each gradient"),
    _stock(
        "ddp_post_local_sgd",
        "post_local_sgd",
        APART,
        "lets ranks train alone between averagings, so their weights differ until the next one",
    ),
)

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (*_STOCK, *(each for algorithm in ALGORITHMS.values() for each in algorithm.methods))
}
"""The methods that the planner compares, by the names that `gossamer plan` prints."""


def method_of(name: str) -> Method:
    """The method of that name.

    Raises:
        ConfigError: the name is not in METHODS.
    """
    if name not in METHODS:
        raise ConfigError(f"plan: algorithm must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]
