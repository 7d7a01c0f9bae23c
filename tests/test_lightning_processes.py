# gossamer.lightning in three real processes: one job runs the checks of the lightning_*.py files, since a start costs
# ten seconds. Launchers that start processes themselves have a script of their own.

from pathlib import Path

from ranks import run_job

JOB = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import lightning_equality, lightning_job
lightning_job.run(lightning_equality)
"""


def test_trainer_fabric_and_utilities_on_three_ranks(tmp_path) -> None:
    assert run_job(JOB, 3, tmp_path).count("is done") == 3
