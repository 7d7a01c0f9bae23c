# It measures nothing and chooses no columns; its callers allreduce.py, codec.py and train.py do. matplotlib is imported
# only for a plot.
"""Shows results of `gossamer bench`: lines on stdout, a table of them on stderr, curves and bars in a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gossamer.bench.measuring import emit, label, note, short

Line = Mapping[str, Any]
WIDTH = 120  # columns of a table if there is no terminal


def results(title: str, columns: Mapping[str, str], lines: Sequence[Line], *, command: str) -> None:
    """Prints each line as JSON on stdout, with the command that measured it, and all lines as a table on stderr.

    The keys of ``columns`` are fields of the lines, its values are the heads of the table.
    """
    for line in lines:
        emit({**line, "command": command})
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=WIDTH)
    grid = Table(title=title, title_justify="left")
    for field, head in columns.items():
        grid.add_column(head, justify="left" if isinstance(lines[0].get(field), str) else "right")
    for line in lines:
        grid.add_row(*(_cell(line.get(field)) for field in columns))
    console.print(grid)


def curves(
    file: Path, lines: Sequence[Line], *, panels: Mapping[str, str], x: str, series: str, title: str
) -> None:
    """Draws a panel for each field in ``panels`` over the bytes in field ``x``. Its values name the axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    figure.suptitle(title)
    names = list(dict.fromkeys(line[series] for line in lines))
    ticks = sorted({line[x] for line in lines})
    for panel, (field, axis) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name in names:
            own = [line for line in lines if line[series] == name]
            panel.plot([line[x] for line in own], [line[field] for line in own], marker="o", label=name)
        panel.set(xscale="log", yscale="log", ylabel=axis)
        panel.set_xticks(ticks, [label(tick) for tick in ticks], rotation=45)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    save(figure, file)


def bars(file: Path, lines: Sequence[Line], *, panels: Mapping[str, str], series: str, title: str) -> None:
    """Draws a panel for each field in ``panels``, with a bar for each line. The field ``series`` names the bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(panels), 1.5 + 0.35 * len(lines)), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for panel, (field, axis) in zip(grid, panels.items(), strict=True):
        drawn = panel.barh([line[series] for line in lines], [line[field] or 0 for line in lines])
        panel.bar_label(drawn, [_cell(line[field]) for line in lines], padding=3, fontsize="small")
        panel.set_xlabel(axis)
        panel.margins(x=0.15)
    grid[0].invert_yaxis()
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Writes a figure of matplotlib into a PNG, and makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    note(f"plot: {file}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{float(f'{value:.3g}'):,g}" if abs(value) < 1e6 else f"{short(value):,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
