# The tables of docs/topologies.md are what the code does.

import re

from gossamer.topology import TOPOLOGIES, BaseGraph, Topology, consensus_steps
from tests import ROOT

PAGE = ROOT / "docs" / "topologies.md"


def rows_after(header: str, count: int) -> list[list[str]]:
    """Cells of the body of the first table after a line that begins with `header`."""
    lines = PAGE.read_text().split(f"\n{header}")[1].split("\n|", 1)[1].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert len(rows) == count
    return rows


def documented(cell: str) -> Topology:
    """The topology of "`ring`", "`base_graph` (k=1)" or "`BaseGraph(k=2)`"."""
    name, *setting = re.findall(r"\w+", cell)
    return BaseGraph(int(setting[1])) if setting else TOPOLOGIES[name]()


def test_documented_periods_of_the_base_graph_are_right() -> None:
    for k, (_, *cells) in enumerate(rows_after("The period is less", count=3), start=1):
        assert cells == [str(BaseGraph(k).period(size)) for size in range(2, 17)]


def test_documented_rounds_to_the_exact_mean_are_right() -> None:
    for name, *cells in rows_after("## Rounds to the exact mean", count=7):
        steps = [consensus_steps(documented(name), size, limit=15) for size in range(2, 10)]
        assert cells == [str(step or "never") for step in steps]


def test_documented_rounds_to_a_thousandth_are_right() -> None:
    sizes = (4, 5, 7, 8, 12, 16, 24, 32)
    for name, *cells in rows_after("## Rounds to nearly the mean", count=7):
        assert cells == [str(consensus_steps(documented(name), size, 1e-3)) for size in sizes]
