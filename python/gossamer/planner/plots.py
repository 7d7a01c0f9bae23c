# Callers: the command.
"""The two PNG plots of `gossamer plan --plot`: step time over bandwidth and over ranks. Needs matplotlib."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.facts import Settings
from gossamer.planner.methods import METHODS
from gossamer.planner.network import Network
from gossamer.planner.predict import predict_all
from gossamer.planner.problem import Problem
from gossamer.units import rate_text

#: The methods that are drawn by default, one of each sort.
SHOWN = (
    "gradient_allreduce",
    "bf16",
    "bytegrad",
    "int4",
    "onebit",
    "powersgd",
    "decentralized_one_peer_exponential",
    "local_sgd",
    "streaming_diloco",
    "async",
)
LOWEST, HIGHEST = 1e6 / 8, 400e9 / 8  # bytes per second: 1 Mbit/s to 400 Gbit/s
MOST_RANKS = 10_000
_POINTS = 25


def require_matplotlib() -> None:
    """Raises GossamerError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise GossamerError("the plots need matplotlib; pip install it, or leave --plot out")


def draw(
    folder: Path, problem: Problem, network: Network, names: Sequence[str], settings: Settings
) -> list[Path]:
    """Makes the folder, writes plan-bandwidth.png and plan-ranks.png into it, and returns their paths."""
    require_matplotlib()
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    rates = _between(LOWEST, HIGHEST)
    # Every host is as full as the fullest one.
    hosts = sorted(
        {max(1, round(count / network.per_host)) for count in _between(network.per_host, MOST_RANKS)}
    )
    sizes = [count * network.per_host for count in hosts]
    by_rate = [predict_all(problem, network.at(rate), names, settings=settings) for rate in rates]
    by_size = [predict_all(problem, network.of(size), names, settings=settings) for size in sizes]
    here = f"{network.ranks} ranks on {network.hosts} hosts", f"{rate_text(network.bandwidth)} between hosts"
    charts = (
        ("plan-bandwidth.png", [rate * 8 / 1e9 for rate in rates], by_rate, "Gbit/s between hosts", here[0]),
        ("plan-ranks.png", sizes, by_size, f"ranks, {network.per_host} a host", here[1]),
    )
    paths = []
    for name, xs, points, label, title in charts:
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        _lines(figure.subplots(), xs, points, label, f"{title}, {problem.numel:.3g} parameters")
        paths.append(folder / name)
        figure.savefig(paths[-1], dpi=120)
    return paths


def _lines(axes: Any, xs: Sequence[float], points: Sequence[Any], label: str, title: str) -> None:
    steps_s = [{p.algorithm: p.step_s for p in point} for point in points]
    names = [name for name in METHODS if name in steps_s[0]]
    for index, name in enumerate(names):
        style = f"C{index % 10}" + ("-", "--", ":")[index // 10 % 3]
        axes.plot(xs, [step_s[name] for step_s in steps_s], style, label=name)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds of a step, predicted", title=title)
    axes.grid(alpha=0.3)
    axes.figure.legend(loc="outside right upper", fontsize="small")


def _between(low: float, high: float) -> list[float]:
    """Returns points at equal steps on a logarithmic axis."""
    return [low * (high / low) ** (index / (_POINTS - 1)) for index in range(_POINTS)]
