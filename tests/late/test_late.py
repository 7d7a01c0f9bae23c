"""Runs the tests of the simulated device in a process of their own.

There the device is torch's accelerator, which other tests must not see, and autograd starts after it is known.
"""

import os
import re

from tests import ROOT
from tests.support.forks import Script


def test_work_that_is_late_on_a_device_changes_no_result():
    files = ["tests/late/communicator.py", "tests/late/engine.py"]
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
