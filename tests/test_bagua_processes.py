# The Bagua face in four real processes: one job runs the checks of bagua_collectives.py and bagua_batchnorm.py.

from pathlib import Path

from ranks import run_job

JOB = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import bagua_batchnorm, bagua_collectives, bagua_job
bagua_job.run(bagua_collectives, bagua_batchnorm)
"""


def test_bagua_calls_on_groups_of_every_size(tmp_path) -> None:
    assert run_job(JOB, 4, tmp_path).count("is done") == 4
