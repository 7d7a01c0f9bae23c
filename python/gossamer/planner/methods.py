# The table of what the planner compares: the methods that the algorithms list, and torch's own programs.
# Nothing is computed here. Callers: predict.py, advice.py and the command.
"""Methods by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from gossamer.algorithms import ALGORITHMS
from gossamer.codec import Delta, Int4, Int8
from gossamer.errors import ConfigError
from gossamer.facts import APART, COMPRESSED, EXACT, ROUNDED, Method, Settings
from gossamer.process_group import Options


@dataclass(frozen=True)
class Stock:
    """torch's DistributedDataParallel, with one of torch's communication hooks.

    Args:
        hook: None, "fp16", "powersgd" or "post_local_sgd".
        rank: columns of PowerSGD's factors.
        period: steps between two averagings of post-local SGD.
        options: of its process group, if it has no hook.
    """

    hook: str | None = None
    rank: int = 4
    period: int = 10
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Sharded:
    """torch's FSDP2. Each block of a list of layers is sharded by itself, and the rest of the model as the root.

    Args:
        hybrid: shards lie inside a host, with replicas on the other hosts (HSDP). False: all ranks hold shards.
        options: of the groups in which shards are gathered and scattered.
        between: of the groups between replicas.
        weights: how gs.fsdp.compress gathers shards, instead of the options.
    """

    hybrid: bool = False
    options: Options = field(default_factory=Options)
    between: Options = field(default_factory=Options)
    weights: Delta | None = None


def _stock(name: str, hook: str | None, kind: str, changes: str, page: str = "hooks.md") -> Method:
    make: Callable[[Settings], Stock] = lambda settings: Stock(hook, settings.rank, settings.period)  # noqa: E731
    return Method(name, make, kind, changes, page, advised=False)


def _made(program: Stock | Sharded, _: Settings) -> Stock | Sharded:
    return program


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
    Method(
        "fsdp2_delta",
        partial(_made, Sharded(options=Options(Int8()), weights=Delta(Int4()))),
        COMPRESSED,
        "sums gradients in 8 bits, and gathers changes of the weights in 4",
        "fsdp.md",
        advised=False,
    ),
    *(
        Method(name, partial(_made, program), kind, changes, "process-group.md", advised=False)
        for name, program, kind, changes in (
            ("ddp_int8_group", Stock(options=Options(Int8())), ROUNDED, "sums gradients in 8 bits"),
            ("fsdp2", Sharded(), EXACT, "is torch's own, with sharded weights"),
            ("fsdp2_int8_group", Sharded(options=Options(Int8())), ROUNDED, "sums gradients in 8 bits"),
            ("hsdp", Sharded(hybrid=True), EXACT, "is torch's own, with weights sharded inside a host"),
            (
                "hsdp_int8_group",
                Sharded(hybrid=True, between=Options(Int8())),
                ROUNDED,
                "sums gradients between hosts in 8 bits",
            ),
        )
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
