# The Torch-free core's own tests: cmake/ builds csrc's Torch-free folders with GoogleTest under
# AddressSanitizer and UndefinedBehaviorSanitizer, and ctest runs them.

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}:\n{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)  # compiles every Torch-free file with sanitizers
def test_torch_free_core_passes_its_tests_under_sanitizers(tmp_path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    sanitize = "-DGOSSAMER_SANITIZE=address,undefined"
    configured = subprocess.run(
        ["cmake", "-S", ROOT / "cmake", "-B", tmp_path, sanitize], capture_output=True, text=True, check=False
    )
    if configured.returncode != 0 and "GTest" in configured.stderr:
        pytest.skip("CMake does not find GoogleTest (libgtest-dev)")
    assert configured.returncode == 0, configured.stderr
    run("cmake", "--build", tmp_path, "--parallel", "2")
    tested = run("ctest", "--test-dir", tmp_path, "--output-on-failure", "--no-tests=error")
    assert "100% tests passed" in tested
