# The table of what the planner compares: names, the algorithms behind them, and what each changes about a training.
# Adding one = one line of METHODS. Nothing is computed here.
# Callers: predict.py, advice.py and the command.
"""Names of algorithms with their settings, and the peers in stock torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from gossamer.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    OneBitAdam,
    PowerSGD,
    QAdam,
    ZeroOneAdam,
)
from gossamer.codec import BF16, FP16, ErrorFeedback, Int4, OneBit
from gossamer.errors import ConfigError

#: How much of a training a method keeps, best first: the exact mean gradient; the mean of rounded gradients;
#: gradients or momenta of few bits, whose errors are fed back; ranks whose weights differ between averagings.
EXACT, ROUNDED, COMPRESSED, APART = "exact", "rounded", "compressed", "apart"
KINDS = (EXACT, ROUNDED, COMPRESSED, APART)
"""The kinds of a method, from the one that keeps most of a training to the one that keeps least."""


@dataclass(frozen=True)
class Stock:
    """torch's DistributedDataParallel, with one of torch's communication hooks.

    Args:
        hook: None, "fp16", "powersgd" or "post_local_sgd".
        rank: of PowerSGD's factors.
        period: steps between two averagings of post-local SGD.
    """

    hook: str | None = None
    rank: int = 4
    period: int = 10


@dataclass(frozen=True)
class Settings:
    """What a user may choose for methods that have it."""

    period: int = 32
    rank: int = 4


@dataclass(frozen=True)
class Method:
    """`make(settings)`; `changes` ends the sentence "It ..."; `page`: of docs/."""

    make: Callable[[Settings], Algorithm | Stock]
    kind: str
    changes: str
    page: str
    warm: bool = True


def _plain(algorithm: Callable[[], Algorithm | Stock]) -> Callable[[Settings], Algorithm | Stock]:
    return lambda settings: algorithm()


def _stock(hook: str | None = None) -> Callable[[Settings], Stock]:
    return lambda settings: Stock(hook, settings.rank, settings.period)


def _codec(codec: Callable[[], object], **more: bool) -> Callable[[Settings], Algorithm]:
    return lambda settings: GradientAllReduce(codec=codec(), **more)  # type: ignore[arg-type]


def _local(**more: object) -> Callable[[Settings], Algorithm]:
    return lambda settings: LocalSGD(settings.period, **more)  # type: ignore[arg-type]


_INT4 = ErrorFeedback(Int4())
_OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
_ROUND_8 = "rounds each gradient to 8 bits twice, with one scale for each 64 elements"
_ROUND_4 = "sends gradients in 4 bits and adds what that leaves out to the next step's"
_ALONE = "lets ranks train alone between averagings, so their weights differ until the next one"
_NEIGHBOURS = (
    "averages weights with a few peers instead of gradients with all, so ranks hold different weights"
)

METHODS: Mapping[str, Method] = {
    "ddp": Method(_stock(), EXACT, "is torch's own", "ddp.md"),
    "ddp_fp16_hook": Method(_stock("fp16"), ROUNDED, "sums gradients in float16", "hooks.md"),
    "ddp_powersgd_hook": Method(
        _stock("powersgd"), COMPRESSED, "sends two thin factors of each gradient", "hooks.md"
    ),
    "ddp_post_local_sgd": Method(_stock("post_local_sgd"), APART, _ALONE, "hooks.md"),
    "gradient_allreduce": Method(
        _plain(GradientAllReduce), EXACT, "computes what torch DDP does", "algorithms.md"
    ),
    "deterministic": Method(
        _plain(partial(GradientAllReduce, True)), EXACT, "sums in the order of the ranks", "algorithms.md"
    ),
    "bf16": Method(_codec(BF16), ROUNDED, "rounds each gradient to bfloat16 twice", "algorithms.md"),
    "fp16": Method(_codec(FP16), ROUNDED, "rounds each gradient to float16 twice", "algorithms.md"),
    "bytegrad": Method(_plain(ByteGrad), ROUNDED, _ROUND_8, "algorithms.md"),
    "int4": Method(_codec(lambda: _INT4), COMPRESSED, _ROUND_4, "algorithms.md"),
    "onebit": Method(
        _codec(lambda: ErrorFeedback(OneBit())),
        COMPRESSED,
        "sends the signs of gradients and feeds back what that leaves out, which slows the training per step",
        "algorithms.md",
    ),
    "powersgd": Method(
        lambda settings: PowerSGD(settings.rank),
        COMPRESSED,
        "sends two thin factors of each matrix's gradient and feeds back what they leave out",
        "powersgd.md",
    ),
    "qadam_warmup": Method(
        _plain(QAdam), EXACT, "is QAdam's warm-up: Adam with exact gradients", "qadam.md", warm=False
    ),
    "qadam": Method(
        _plain(QAdam), COMPRESSED, "is Adam with a frozen variance and its momentum in 8 bits", "qadam.md"
    ),
    "onebit_adam": Method(
        _plain(OneBitAdam), COMPRESSED, "is Adam with a frozen variance and its momentum in 1 bit", "qadam.md"
    ),
    "zero_one_adam": Method(
        _plain(ZeroOneAdam),
        COMPRESSED,
        "is Adam with a frozen variance whose updates travel in 1 bit",
        "qadam.md",
    ),
    "decentralized": Method(
        _plain(Decentralized),
        APART,
        "averages weights of before the step, with all ranks",
        "decentralized.md",
    ),
    **{
        f"decentralized_{name}": Method(
            _plain(partial(Decentralized, name)), APART, _NEIGHBOURS, "decentralized.md"
        )
        for name in ("ring", "shift_one", "one_peer_exponential", "base_graph")
    },
    "low_precision_decentralized": Method(
        _plain(LowPrecisionDecentralized),
        APART,
        f"{_NEIGHBOURS}, and sends them in 8 bits",
        "low-precision-decentralized.md",
    ),
    "local_sgd": Method(_local(), APART, _ALONE, "local-sgd.md"),
    "diloco": Method(
        _local(outer_optimizer=_OUTER), APART, f"{_ALONE}, which an outer optimizer makes", "local-sgd.md"
    ),
    "streaming_diloco": Method(
        lambda settings: LocalSGD(
            settings.period,
            _OUTER,
            codec=_INT4,
            fragments=min(2, settings.period),
            delay=min(1, settings.period - 1),
            merge=0.5,
        ),
        APART,
        f"{_ALONE}, whose changes travel in 4 bits beside the training",
        "local-sgd.md",
    ),
    "async": Method(
        _plain(AsyncModelAverage), APART, "averages weights in the background, whenever it can", "async.md"
    ),
}
"""The methods that the planner compares, by the names that `gossamer plan` prints."""


def method_of(name: str) -> Method:
    """ConfigError for a name that is not in METHODS."""
    if name not in METHODS:
        raise ConfigError(f"plan: algorithm must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]
