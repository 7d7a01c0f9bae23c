# The CUDA kernels without a GPU: tests/cpp/cuda runs on an emulator under AddressSanitizer and
# UndefinedBehaviorSanitizer, and must find the faults of faults.py. Another program counts launches and bytes.

import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ROOT
from tests.repository.faults import FAULTS, Fault
from tests.repository.kernels import FLOAT32, PROGRAMS, Unit, compile_units, link, run, with_faults

pytestmark = pytest.mark.xdist_group("kernels")  # these tests share their objects, so one worker runs them


def put_faults_into(tree: Path) -> None:
    for path in {fault.path for fault in FAULTS}:
        shutil.copytree((ROOT / path).parent, (tree / path).parent, dirs_exist_ok=True)
    for number, fault in enumerate(FAULTS):
        fault.put_into(tree, number)


def faulty_units(program: str) -> tuple[Unit, ...]:
    paths = {fault.path for fault in FAULTS if fault.program == program}
    sources = {path if path.endswith((".cu", ".cpp")) else FLOAT32 for path in paths}
    return with_faults(PROGRAMS[program], sources)


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> Path:
    """A folder with the objects of all programs, as they are and with faults."""
    folder, tree = tmp_path_factory.mktemp("objects"), tmp_path_factory.mktemp("faulty")
    put_faults_into(tree)
    units = [unit for name in PROGRAMS for unit in (*faulty_units(name), *PROGRAMS[name])]
    compile_units(tuple(dict.fromkeys(units)), folder, tree)
    return folder


def failures(check: Callable[..., str], items: Sequence[object]) -> str:
    """What `check` says of the items, two at a time; empty if all are right."""
    with ThreadPoolExecutor(2) as pool:
        return "\n".join(filter(None, pool.map(check, items)))


@pytest.mark.sanitize
@pytest.mark.timeout(1200)  # compiles every kernel with sanitizers; a busy machine takes long
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kernel_gives_the_bytes_of_the_cpu_on_an_emulator_under_sanitizers(
    name, objects, tmp_path
) -> None:
    program = tmp_path / "program"
    link([unit.object(objects) for unit in PROGRAMS[name]], program)

    def failure(test: str) -> str:
        tested = run(program, test, timeout_s=600)
        passed = tested.returncode == 0 and "1 tests, 0 failed, 0 skipped" in tested.stdout
        return "" if passed else f"{test}:\n{tested.stdout[-3000:]}\n{tested.stderr[-3000:]}"

    tests = run(program, "--list").stdout.split()
    assert tests
    assert not failures(failure, tests)


@pytest.mark.sanitize
@pytest.mark.timeout(1200)  # as above
@pytest.mark.parametrize("name", sorted({fault.program for fault in FAULTS}))
def test_the_emulator_and_the_sanitizers_catch_every_fault(name, objects, tmp_path) -> None:
    program = tmp_path / "program"
    link([unit.object(objects) for unit in faulty_units(name)], program)
    faults = [fault for fault in FAULTS if fault.program == name]

    def failure(fault: Fault) -> str:
        tested = run(program, fault.test, timeout_s=600, EMULATOR_FAULT=str(FAULTS.index(fault)))
        written = tested.stdout + tested.stderr
        if tested.returncode != 0 and re.search(fault.says, written):
            return ""
        return f"{fault.name}: exit code {tested.returncode}, without {fault.says!r}:\n{written[-3000:]}"

    def failure_without_fault(test: str) -> str:
        tested = run(program, test, timeout_s=600)
        return "" if tested.returncode == 0 else f"{test} fails without a fault:\n{tested.stdout[-3000:]}"

    assert not failures(failure, faults)
    assert not failures(failure_without_fault, sorted({fault.test for fault in faults}))


def test_a_fault_whose_text_is_gone_is_an_error(tmp_path) -> None:
    put_faults_into(tmp_path)
    with pytest.raises(AssertionError, match="must hold this text once, and holds it 0 times"):
        replace(FAULTS[0], before="no such text").put_into(tmp_path, 0)
