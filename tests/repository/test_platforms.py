# Platforms other than Linux on x86-64. For 64-bit ARM a cross-compiler makes the Torch-free core with its tests, and
# QEMU runs them, with ranks as threads and as processes. On other systems than Linux setup.py says what to do instead.

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import ROOT
from tests.repository.test_cpp import run

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = "apt-get install g++-aarch64-linux-gnu qemu-user libgtest-dev"
# Each run of the emulator: a program, and a filter of its tests. Collectives over many sizes take minutes, and are left
# out. The mailboxes of processes have a run of their own, because QEMU 7.2 aborts a forked process that starts a thread
# if its parent has ever had several.
RUNS = (
    ("gossamer_tests", "*"),
    ("gossamer_shm_tests", "Meet.*:Ends.*:Barrier.*:Windows.*:Mailbox.*:Reduce.*-Mailbox.*Processes*"),
    ("gossamer_shm_tests", "Mailbox.*Processes*:AllReduce.Processes*"),
    ("gossamer_negotiate_tests", "*"),
)


def emulated(program: Path, tests: str) -> str:
    library = f"/usr/{COMPILER.removesuffix('-g++')}"
    return run(EMULATOR, "-L", library, program, "--gtest_brief=1", f"--gtest_filter={tests}")


@pytest.mark.sanitize
@pytest.mark.timeout(1200)  # compiles and emulates; a busy machine takes long
def test_torch_free_core_passes_its_tests_on_64_bit_arm(tmp_path) -> None:
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR) and Path("/usr/src/googletest").exists()):
        pytest.skip(f"needs a cross-compiler, QEMU and GoogleTest's sources: {PACKAGES}")
    run("cmake", "-S", ROOT / "cmake", "-B", tmp_path, "-DCMAKE_TOOLCHAIN_FILE=aarch64.cmake")
    run("cmake", "--build", tmp_path, "--parallel", "2", "--target", *{program for program, _ in RUNS})
    with ThreadPoolExecutor(2) as threads:
        for printed in threads.map(lambda each: emulated(tmp_path / each[0], each[1]), RUNS):
            assert "[  PASSED  ]" in printed, printed
            assert "SKIPPED" not in printed, printed


# The files with torch headers are not compiled for ARM here, for that takes minutes.
def test_code_for_x86_alone_stands_where_other_processors_have_their_own() -> None:
    pattern = re.compile(r"immintrin|\b_mm\d*_|\b__m(128|256|512)|__builtin_(ia32|cpu_supports)")
    found = {
        str(path.relative_to(ROOT / "csrc"))
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".cpp", ".h", ".inl") and pattern.search(path.read_text())
    }
    lanes = {"base/lanes_avx2.h", "base/lanes_avx512.h", "base/lanes_avx_bytes.h", "base/lanes_avx.inl"}
    assert found == {*lanes, "base/lanes_vector.inl", "base/kernel_tables.h", "shm/futex.h"}


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_setup_says_on_another_system_where_gossamer_runs(system) -> None:
    code = f"import platform, runpy, setuptools; platform.system = lambda: {system!r}; runpy.run_path('setup.py')"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert result.stderr.startswith(f"setup.py: Gossamer must be installed on Linux, got {system}: ")
    for words in ("shared memory", "Linux container", "WSL 2"):
        assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
