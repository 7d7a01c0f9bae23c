# Makes lines of results from what the ranks have measured: medians over turns and seeds, ratios to stock DDP in the
# same turn, and the time that the link itself needs for the bytes. command.py prints the lines.
"""Lines of ``gossamer bench network``."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.bench.measuring import paired, place, result, short, spread
from gossamer.netlab.comparison.loss import FIRST
from gossamer.netlab.comparison.steps import ALONE, COMPARED
from gossamer.netlab.comparison.variants import VARIANTS
from gossamer.units import parse_rate

ALLOWED = 1.15  # a step should take at most this times the byte limit, plus its compute
Ranks = Sequence[Mapping[str, list[float]]]


def of_steps(found: Sequence[Mapping[str, Ranks]], about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a line for each variant.

    Args:
        found: for each group of variants that took turns, the turns of each rank, by variant and for steps alone. A
            variant in several groups is compared in each, and has its line from the first.
        about: facts of the run, at least `hosts`, `ranks_per_host` and `rate`.
    """
    lines: list[dict[str, Any]] = []
    first: dict[str, list[float]] = {}
    ddp_bytes: float | None = None
    for group in found:
        if FIRST in group:
            ddp_bytes = _mean(group[FIRST], "payload_of_kernel")
        own = {name: _slowest(ranks) for name, ranks in group.items()}
        new = [name for name in own if name not in first and not name.startswith(ALONE)]
        times = first | own
        lines += [_line(name, group[name], times, about, ddp_bytes) for name in new]
        first = own | first
    return lines


def _line(
    name: str,
    ranks: Ranks,
    times: Mapping[str, list[float]],
    about: Mapping[str, Any],
    ddp_bytes: float | None,
) -> dict[str, Any]:
    variant, turns = VARIANTS[name], times[name]
    step_ms = 1e3 * statistics.median(turns)
    compute_ms = 1e3 * statistics.median(times[ALONE + variant.optimizer])
    extra = {"algorithm": name, **about, "period": variant.period}
    extra |= {"step_ms": short(step_ms), "step_spread_ms": short(1e3 * spread(turns))}
    extra |= {"compute_ms": short(compute_ms)}
    extra |= _bytes(ranks, about, ddp_bytes)
    extra |= _limits(extra, step_ms, compute_ms, rests=not variant.trial.by_clock)
    for peer in COMPARED:
        if peer in times and peer != name:
            speedup = statistics.median(paired(times[peer], turns))
            extra[f"speedup_over_{peer.removeprefix('ddp_')}"] = short(speedup)
    line = result(
        f"step, {_where(about)}, {name}",
        step_ms,
        unit="ms",
        benchmark="network",
        baseline=("ddp", 1e3 * statistics.median(times["ddp"])) if "ddp" in times else None,
        ratio=extra.get("speedup_over_ddp"),
        samples=[1e3 * each for each in turns],
        ratio_is="ddp / this",
        **extra,
    )
    return line | place()


def _slowest(ranks: Ranks) -> list[float]:
    """Returns the seconds of each turn on the slowest rank."""
    return [max(turn) for turn in zip(*(rank["seconds"] for rank in ranks), strict=True)]


def _bytes(ranks: Ranks, about: Mapping[str, Any], ddp_bytes: float | None) -> dict[str, Any]:
    """Returns the bytes of a step: of a rank by Gossamer's count, of a host by the kernel's. Means over all turns."""
    kernel, payload = _mean(ranks, "bytes_of_kernel"), _mean(ranks, "payload_of_kernel")
    counted = _mean(ranks, "bytes_counted") if ranks[0]["bytes_counted"] else None
    alone = about["ranks_per_host"] == 1
    return {
        "bytes_per_step": None if counted is None else round(counted),
        "bytes_by_kernel": round(kernel),
        "payload_by_kernel": round(payload),
        "bytes_over_ddp": short(payload / ddp_bytes) if ddp_bytes else None,
        "bytes_difference": short(payload / counted - 1) if counted and alone else None,
    }


def _limits(line: Mapping[str, Any], step_ms: float, compute_ms: float, *, rests: bool) -> dict[str, Any]:
    """Returns the time that a host's link needs for the bytes of a line alone, and the ratio of the step to it.

    The bytes are Gossamer's count if each host has one rank and Gossamer counts, otherwise the kernel's. None for a
    variant that never rests. The ratio is None if nothing leaves a host.
    """
    counted = line["bytes_per_step"] if line["ranks_per_host"] == 1 else None
    of_host = line["payload_by_kernel"] if counted is None else counted
    limit_ms = 1e3 * of_host / parse_rate(line["rate"])
    return {
        "byte_limit_ms": short(limit_ms) if rests else None,
        "step_over_limit": short(step_ms / limit_ms) if rests and limit_ms else None,
        "step_over_allowed": short(step_ms / (ALLOWED * limit_ms + compute_ms)) if rests else None,
    }


def _mean(ranks: Ranks, field: str) -> float:
    return statistics.fmean(each for rank in ranks for each in rank[field])


def of_losses(curves: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a line for each variant: its seconds to the loss that stock DDP ends with, the median over the seeds.

    If ranks hold different weights, one more exact mean is needed at the end, and its time counts. A seed that does not
    reach the loss in `loss.PATIENCE` times the steps counts as infinitely long, so a median may be missing.
    """
    seeds = sorted({curve["seed"] for curve in curves})
    full_s = {curve["seed"]: curve["seconds"][-1] for curve in curves if curve["algorithm"] == FIRST}
    targets = {curve["seed"]: curve["losses"][-1] for curve in curves if curve["algorithm"] == FIRST}
    lines = []
    for name in dict.fromkeys(curve["algorithm"] for curve in curves):
        own = {curve["seed"]: curve for curve in curves if curve["algorithm"] == name}
        seconds = [time_to(own[seed], targets[seed]) for seed in seeds]
        speedups = [full_s[seed] / taken for seed, taken in zip(seeds, seconds, strict=True)]
        median_s = statistics.median(seconds)
        reached = median_s != float("inf")
        lines.append(
            result(
                f"time to the loss stock DDP ends with, {_where(about)}, {name}",
                median_s if reached else -1.0,
                unit="s" if reached else "s (-1: not reached)",
                benchmark="network",
                baseline=(FIRST, statistics.median(full_s.values())),
                ratio=statistics.median(speedups),
                ratio_is="ddp / this",
                algorithm=name,
                **about,
                seeds=len(seeds),
                targets=[short(target) for target in targets.values()],
                seconds=[_finite(each) for each in seconds],
                speedups=[short(each) for each in speedups],
                steps=[own[seed]["steps"][-1] for seed in seeds],
                final_losses=[_finite(own[seed]["losses"][-1]) for seed in seeds],
            )
            | place()
        )
    return lines


def _where(about: Mapping[str, Any]) -> str:
    return f"{about['hosts']} hosts x {about['ranks_per_host']}, {about['rate']}, {about['model']}"


def _finite(value: float) -> float | None:
    """JSON has no infinity, and no NaN, which a training that diverged ends with."""
    return short(value) if math.isfinite(value) else None


def time_to(curve: Mapping[str, Any], target: float) -> float:
    """Seconds until the first validation at or below the target, and for the mean if ranks are apart; else infinity."""
    for seconds, loss in zip(curve["seconds"], curve["losses"], strict=True):
        if loss <= target:
            return float(seconds + curve["consensus_s"])
    return float("inf")
