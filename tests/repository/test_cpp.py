# The Torch-free core's own tests: cmake/ builds csrc's Torch-free folders with GoogleTest. All of
# them under AddressSanitizer and UndefinedBehaviorSanitizer; those of shm/ and negotiate/, the ones with threads, under
# ThreadSanitizer as well. Of shm/ it sees races within one mapping of the shared memory only: each rank has its own. It
# gets no tests without threads: those of a sum's arithmetic, and collectives of processes.

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT


def run(*command: str | Path) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}:\n{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    return result.stdout


def configure(folder: Path, sanitizers: str) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    command = ["cmake", "-S", ROOT / "cmake", "-B", folder, f"-DGOSSAMER_SANITIZE={sanitizers}"]
    configured = subprocess.run(command, capture_output=True, text=True, check=False)
    if configured.returncode != 0 and "GTest" in configured.stderr:
        pytest.skip("CMake does not find GoogleTest (libgtest-dev)")
    assert configured.returncode == 0, configured.stderr


# A sanitizer and a program in each test, and the tests of the program that run, so that two tests keep two cores busy.
CASES = [
    ("address,undefined", "gossamer_shm_tests", "*"),
    ("address,undefined", "gossamer_negotiate_tests", "*"),
    ("address,undefined", "gossamer_tests", "*"),
    ("thread", "gossamer_shm_tests", "-Reduce.*:*.Processes*:Rounds.*Processes*"),
    ("thread", "gossamer_negotiate_tests", "*"),
]


@pytest.mark.sanitize
@pytest.mark.timeout(1200)  # compiles with sanitizers; a busy machine takes long
@pytest.mark.parametrize(("sanitizers", "program", "tests"), CASES)
def test_torch_free_core_passes_its_tests_under_sanitizers(sanitizers, program, tests, tmp_path) -> None:
    """Each program runs in one process. ctest would start one for each test, which takes a sanitizer a second each."""
    configure(tmp_path, sanitizers)
    run("cmake", "--build", tmp_path, "--parallel", "2", "--target", program)
    tested = run(tmp_path / program, "--gtest_brief=1", f"--gtest_filter={tests}")
    assert "[  PASSED  ]" in tested, tested
    assert "DISABLED" not in tested, tested
