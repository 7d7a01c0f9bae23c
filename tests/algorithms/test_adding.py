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
    # The contract, all facts, the layers, and the algorithm's own test.
    files = [
        "tests/algorithms/test_contract.py",
        "tests/algorithms/test_facts.py",
        "tests/repository/test_repo.py",
    ]
    printed = pytest_in(tmp_path, "-rp", *files, named[3], "-k", "clipped_mean or test_facts")
    its_own = re.findall(r"^PASSED .*clipped_mean.*", printed, re.MULTILINE)
    assert len(its_own) >= 20, printed
