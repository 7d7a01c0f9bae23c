"""The job of this room: three processes. Tests that use it run in all three; see tests/support/jobs.py."""

import importlib.util
from collections.abc import Iterator

import pytest

import gossamer as gs
from tests.support.jobs import Job

if importlib.util.find_spec("lightning") is None:
    # test_face.py and test_refusals.py say that they are skipped, and why.
    collect_ignore = [
        f"test_{name}.py" for name in ("distributed", "equality", "horovod", "resuming", "training")
    ]


@pytest.fixture(scope="package")
def job() -> Iterator[Job]:
    from tests.lightning import loop

    with Job(3) as job, job.within(loop.begin, gs.shutdown):
        yield job
