"""Runs the tests of the simulated device in processes of their own.

There the device is torch's accelerator, which other tests must not see, and autograd starts after it is known.
"""

import os
import re

import pytest

from tests import ROOT
from tests.support.forks import Script
from tests.support.ranks import run_job

LATE = ROOT / "tests" / "late"
HOST_MEMORY = LATE / "host_memory.py"


def test_work_that_is_late_on_a_device_changes_no_result():
    files = [f"tests/late/{name}.py" for name in ("communicator", "background", "engine", "process_group")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    script = Script(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files], environment, ROOT
    )
    try:
        code, out, err = script.finish(timeout_s=220)
    finally:
        script.end()
    assert code == 0, out + err
    assert re.search(r"^(\d+) passed in", out, re.MULTILINE), out


# The functions that the ranks of one job call one after the other, with their arguments.
@pytest.mark.parametrize(
    ("size", "calls"),
    [
        (2, "sums side + training all + pieces main"),
        (3, "sums all + training main + memory + pieces all"),
        (4, "two_levels 0,1/2,3 1/0,3,2"),
    ],
)
def test_sums_through_memory_of_the_host_have_the_bits_of_cpu_tensors(size, calls, tmp_path):
    run_job(HOST_MEMORY.read_text(), size, tmp_path, calls)


def test_a_rank_that_ends_is_named_by_those_that_meet_it_in_memory_of_the_host(tmp_path):
    assert run_job(HOST_MEMORY.read_text(), 3, tmp_path, "death").count("said") == 2  # lines may mix


def test_operations_have_one_order_of_launches_on_all_ranks(tmp_path):
    assert run_job((LATE / "order.py").read_text(), 2, tmp_path).count("alike: 16") == 2


@pytest.mark.parametrize("group", ["None", "HostMemory"])
def test_after_a_failure_the_device_is_free(group, tmp_path):
    assert run_job((LATE / "failure.py").read_text(), 3, tmp_path, group).count("free: ") == 2
