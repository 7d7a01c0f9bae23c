"""The job of this room: four processes, once for each backend. Its tests run in all four; see tests/support/jobs.py."""

from collections.abc import Iterator

import pytest

from tests.horovod import sets
from tests.support.jobs import Job


@pytest.fixture(scope="package", params=["gossamer", "gloo"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with Job(4, {"HOROVOD_CPU_OPERATIONS": request.param}) as job, job.within(sets.begin, sets.end):
        yield job
