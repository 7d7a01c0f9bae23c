"""The job of this room: four processes. Tests that use it run in all four; see tests/support/jobs.py."""

from collections.abc import Iterator

import pytest

import gossamer as gs
from tests.bagua import groups
from tests.support.jobs import Job


@pytest.fixture(scope="package")
def job() -> Iterator[Job]:
    with Job(4) as job, job.within(groups.begin, gs.shutdown):
        yield job
