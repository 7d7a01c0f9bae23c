"""Tests in the ranks of a job (tests/support/jobs.py): each fails alone, and says on which rank and why."""

import os
import re
import subprocess
from pathlib import Path

from tests import ROOT
from tests.support import quick_python

CONFTEST = """
import pytest
from tests.support.jobs import Job, run_in_ranks

def pytest_pyfunc_call(pyfuncitem):
    return run_in_ranks(pyfuncitem) or None

def begin(size):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    assert dist.get_world_size() == size

def end():
    import torch.distributed as dist
    dist.destroy_process_group()
    print("ended")

@pytest.fixture(scope="session", params=[2, 3])
def job(request):
    with Job(request.param, {"GIVEN": "yes"}, limit_s=4, grace_s=1) as job, job.within(begin, end, size=request.param):
        yield job
"""

TESTS = """
import os
import time
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.usefixtures("job")

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return int(x)

def test_a_sum_of_all_ranks():
    assert total() == dist.get_world_size()
    assert os.environ["GIVEN"] == "yes"

@pytest.mark.parametrize("factor", [1, 2])
def test_with_a_parameter_and_a_folder(factor, tmp_path):
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size()
    assert factor == 1, "the factor is two"

def test_one_rank_fails_while_the_others_wait_for_it():
    if dist.get_rank() == 1:
        secret = 4321
        raise ValueError("only here")
    total()

def test_one_rank_is_out_of_step_and_the_others_are_done():
    if dist.get_rank() == 1:
        total()

def test_one_rank_ends():
    if dist.get_rank() == 1:
        print("a last word", flush=True)
        os._exit(3)
    total()

def test_that_all_ranks_skip():
    pytest.skip("not here")

def test_that_one_rank_skips():
    if dist.get_rank() == 0:
        pytest.skip("only here")

def test_another_sum_of_all_ranks():
    assert total() == dist.get_world_size()
"""

FAILING = {
    "test_with_a_parameter_and_a_folder[2-2]": (
        "rank 0 of 2: Traceback",
        "AssertionError: the factor is two",
    ),
    "test_one_rank_fails_while_the_others_wait_for_it[2]": (
        "rank 1 of 2: Traceback",
        "ValueError: only here",
        "secret = 4321",
        "rank 0 of 2: ",
    ),
    "test_one_rank_is_out_of_step_and_the_others_are_done[2]": (
        "rank 1 of 2: did not return",
        "in total",
    ),
    "test_one_rank_ends[2]": ("rank 1 of 2: the process ended with exit code 3", "a last word"),
    "test_that_one_rank_skips[2]": ("rank 0 of 2: skipped: only here",),
}


def run(folder: Path, *arguments: str, conftest: str = CONFTEST) -> str:
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_sample.py").write_text(TESTS)
    path = os.pathsep.join(filter(None, [str(ROOT), str(folder), os.environ.get("PYTHONPATH")]))
    command = [
        quick_python.program(),
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        *arguments,
        "test_sample.py",
    ]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def test_a_test_that_fails_in_a_job_fails_alone_and_says_why(tmp_path) -> None:
    output = run(tmp_path, "-k", "[2")
    passed = set(re.findall(r"^PASSED test_sample.py::(\S+)", output, re.MULTILINE))
    failed = set(re.findall(r"^FAILED test_sample.py::(\S+)", output, re.MULTILINE))
    assert passed == {
        "test_a_sum_of_all_ranks[2]",
        "test_with_a_parameter_and_a_folder[2-1]",
        "test_another_sum_of_all_ranks[2]",
    }
    assert failed == set(FAILING)
    assert "not here" in output
    for test, texts in FAILING.items():
        section = output.split(f"_ {test} _")[1].split("\n____")[0]
        for text in texts:
            assert text in section, section


def test_one_test_of_a_job_can_be_chosen_and_a_rank_that_ends_badly_is_an_error(tmp_path) -> None:
    ends_badly = CONFTEST.replace('print("ended")', "import atexit, os; atexit.register(os._exit, 5)")
    output = run(tmp_path, "-k", "another_sum and 2", conftest=ends_badly)
    assert "1 passed, 17 deselected, 1 error" in output, output
    assert "ranks ended with exit codes [5, 5]" in output, output
