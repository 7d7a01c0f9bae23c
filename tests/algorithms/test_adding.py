# docs/adding-an-algorithm.md, followed in a copy of the repository: one file, one line, one test, one row of a page.

import re

import pytest

from tests.support.recipes import follow, pytest_in


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_algorithm_added_as_the_page_says_meets_the_contract(tmp_path) -> None:
    named = follow("docs/adding-an-algorithm.md", tmp_path)
    assert named == [
        "python/gossamer/algorithms/clipped_mean.py",
        "python/gossamer/algorithms/__init__.py",
        "python/gossamer/algorithms/__init__.py",
        "tests/algorithms/test_clipped_mean.py",
        "docs/algorithms.md",
        "docs/hooks.md",
    ]
    # The contract, the facts, the layers, and the algorithm's own test; 15 are of the two general files.
    files = [
        "tests/algorithms/test_contract.py",
        "tests/algorithms/test_facts.py",
        "tests/repository/test_repo.py",
    ]
    printed = pytest_in(tmp_path, *files, named[3], "-k", "clipped_mean")
    found = re.search(r"(\d+) passed", printed)
    assert found
    assert int(found[1]) >= 20, printed
    pytest_in(tmp_path, "tests/algorithms/test_facts.py")
