# Every algorithm of the name table states its facts: its methods, its traffic and its page. The planner, the lab, the
# benchmarks and the hooks take them from there. A gap fails here.

import re

import pytest
import torch

import gossamer as gs
from gossamer.algorithms import ALGORITHMS
from gossamer.facts import KINDS, Settings
from gossamer.hooks import HOOKS
from gossamer.netlab.comparison.variants import OURS
from gossamer.planner import METHODS, Network, Sharded, Stock, predict, transformer
from tests import ROOT

OF_ALGORITHMS = [(name, method) for name, kind in ALGORITHMS.items() for method in kind.methods]
IDS = [method.name for _, method in OF_ALGORITHMS]
SETTINGS = Settings(period=8, rank=2)


def row_of(page: str, text: str) -> list[str]:
    """The cells of the one row of a page's tables whose first two cells hold `text`."""
    rows = [line.strip("|").split("|") for line in (ROOT / page).read_text().splitlines() if line[:1] == "|"]
    found = [[cell.strip() for cell in row] for row in rows if any(text in cell for cell in row[:2])]
    assert found, f"{page}: no row of a table has {text}"
    return found[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_method_a_trial_and_a_row_in_the_table_of_its_page(name) -> None:
    algorithm = ALGORITHMS[name]
    assert algorithm.name == name
    assert algorithm.__doc__
    assert "methods" in vars(algorithm), f"{algorithm.__name__} must list its own methods"
    assert algorithm.methods
    assert any(method.trial is not None for method in algorithm.methods)
    form = row_of("docs/algorithms.md", f'`"{name}"`')[0]
    assert f"{algorithm.__name__}(" in form
    (page,) = {method.page for method in algorithm.methods}
    linked = re.findall(r"\]\(([\w-]+\.md)", form)
    assert linked == ([page] if page != "algorithms.md" else [])


def test_no_two_methods_share_a_name() -> None:
    assert sorted(IDS) == sorted(set(IDS))
    of_torch = {
        name for name, method in METHODS.items() if isinstance(method.make(SETTINGS), (Stock, Sharded))
    }
    assert set(IDS) == set(METHODS) - of_torch


@pytest.mark.parametrize(("name", "method"), OF_ALGORITHMS, ids=IDS)
def test_a_method_makes_its_algorithm_and_is_described(name, method) -> None:
    assert type(method.make(SETTINGS)) is ALGORITHMS[name]
    assert method.kind in KINDS
    assert re.fullmatch(r"[a-z][^\n]*[^.\s]", method.changes), "it completes the sentence 'It ...'"
    assert (ROOT / "docs" / method.page).exists()


@pytest.mark.parametrize(("name", "method"), OF_ALGORITHMS, ids=IDS)
def test_a_method_is_planned(name, method) -> None:
    problem, _ = transformer(300_000, 0.01)
    alone, together = (predict(problem, Network(ranks), method.name, settings=SETTINGS) for ranks in (1, 4))
    assert alone.bytes_per_rank == 0
    assert together.bytes_per_rank > 0
    assert together.step_s >= problem.compute_s


@pytest.mark.parametrize("name", [method.name for _, method in OF_ALGORITHMS if method.trial is not None])
def test_a_method_with_a_trial_is_trained_by_the_lab(name) -> None:
    variant = OURS[name]
    assert variant.ours is not None
    algorithm = variant.ours()
    params = [torch.zeros(2, requires_grad=True)]
    optimizer = type(algorithm).make_optimizer(params, lr=0.1, warmup_steps=1)
    algorithm.use_optimizers([optimizer])  # refuses a wrong one
    assert type(optimizer).__name__ == variant.optimizer


@pytest.mark.parametrize("name", [method.name for _, method in OF_ALGORITHMS if method.hook])
def test_a_method_that_is_a_hook_is_offered_and_described(name) -> None:
    assert getattr(gs.hooks, name) is HOOKS[name]
    assert METHODS[name].changes in (HOOKS[name].__doc__ or "")
    assert METHODS[name].make(SETTINGS).for_any_buckets().fields == ("grad",)
    assert f"`{name}`" in (ROOT / "docs" / "hooks.md").read_text()


def test_an_algorithm_without_facts_is_refused_where_they_are_needed() -> None:
    class Silent(gs.Algorithm):
        name = "silent"

    problem, _ = transformer(300_000, 0.01)
    with pytest.raises(gs.ConfigError, match=r"plan: Silent must define traffic\(messages\)"):
        predict(problem, Network(2), Silent())
    with pytest.raises(gs.ConfigError, match=r"hooks: Silent\(\) cannot be a hook"):
        Silent().for_any_buckets()
