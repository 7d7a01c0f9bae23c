# The picture of `gossamer bench network --to-loss`: the validation loss of every variant against seconds of training.
# command.py draws it, and the study in benchmarks/netlab draws it again from the written curves.
"""Loss against seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.bench.showing import save


def curves(file: Path, runs: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Draws a colour for each variant and a thin line for each seed, over logarithmic seconds. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    names = list(dict.fromkeys(run["algorithm"] for run in runs))
    for index, name in enumerate(names):
        own = [run for run in runs if run["algorithm"] == name]
        style = f"C{index % 10}" + ("-" if index < 10 else "--")
        for number, run in enumerate(own):
            label = name if number == 0 else "_"
            panel.plot(run["seconds"][1:], run["losses"][1:], style, linewidth=1, label=label)
    panel.set(xscale="log", xlabel="seconds of training", ylabel="validation loss, nats", title=title)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    save(figure, file)
