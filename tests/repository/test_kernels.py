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
from tests.repository.faults import EMULATED, FAULTS, Fault
from tests.repository.kernels import (
    COMPARISON,
    COUNTED_FLAGS,
    FLOAT32,
    HOST_MEMORY,
    KERNELS,
    OWN_TESTS,
    REFERENCE,
    SCHEDULER,
    SHARED_MEMORY,
    TRAFFIC,
    Unit,
    compile_unit,
    compile_units,
    link,
    only,
    run,
)

pytestmark = pytest.mark.xdist_group("kernels")  # these tests share their objects, so one worker runs them
ALL = (*KERNELS, COMPARISON, SCHEDULER, *REFERENCE)
RANKS = (*KERNELS, HOST_MEMORY, SHARED_MEMORY, SCHEDULER, *REFERENCE)


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> Path:
    """A folder with the objects of the sources as they are."""
    folder = tmp_path_factory.mktemp("objects")
    compile_units(tuple(dict.fromkeys((*ALL, *RANKS, OWN_TESTS, *TRAFFIC))), folder)
    return folder


def failures(check: Callable[..., str], items: Sequence[object]) -> str:
    """What `check` says of the items, two at a time; empty if all are right."""
    with ThreadPoolExecutor(2) as pool:
        return "\n".join(filter(None, pool.map(check, items)))


@pytest.mark.sanitize
@pytest.mark.timeout(1200)  # compiles every kernel with sanitizers; a busy machine takes long
@pytest.mark.parametrize(
    "units",
    [ALL, RANKS, (OWN_TESTS, SCHEDULER), TRAFFIC],
    ids=["kernels", "ranks", "emulator", "traffic"],
)
def test_every_kernel_gives_the_bytes_of_the_cpu_on_an_emulator_under_sanitizers(
    units, objects, tmp_path
) -> None:
    program = tmp_path / "program"
    link([unit.object(objects) for unit in units], program)

    def failure(name: str) -> str:
        tested = run(program, name, timeout_s=600)
        passed = tested.returncode == 0 and "1 tests, 0 failed, 0 skipped" in tested.stdout
        return "" if passed else f"{name}:\n{tested.stdout[-3000:]}\n{tested.stderr[-3000:]}"

    names = run(program, "--list").stdout.split()
    assert names
    assert not failures(failure, names)


def build_with(fault: Fault, folder: Path, objects: Path) -> Path:
    """A program that holds the fault. What the fault does not touch comes from `objects`."""
    shutil.copytree((ROOT / fault.path).parent, (folder / fault.path).parent)
    fault.put_into(folder)
    source = fault.path if fault.path.endswith((".cu", ".cpp")) else FLOAT32
    if fault.counted:
        unit = Unit(source, COUNTED_FLAGS, sanitized=False, name="changed.cu")
    else:
        flags = ("-w", *(only(fault.codec) if fault.codec else ()))  # a fault may leave something unused
        unit = Unit(source, flags, name="changed.cu")
    compile_unit(unit, folder, folder)
    all_units = (OWN_TESTS, SCHEDULER) if source == EMULATED else TRAFFIC if fault.counted else ALL
    others = [other for other in all_units if other.source != source]
    link([unit.object(folder), *(other.object(objects) for other in others)], folder / "program")
    return folder / "program"


@pytest.mark.sanitize
@pytest.mark.timeout(1200)  # as above
def test_the_emulator_and_the_sanitizers_catch_every_fault(objects, tmp_path) -> None:
    def failure(fault: Fault) -> str:
        program = build_with(fault, tmp_path / str(FAULTS.index(fault)), objects)
        tested = run(program, fault.test, timeout_s=600)
        written = tested.stdout + tested.stderr
        if tested.returncode != 0 and re.search(fault.says, written):
            return ""
        return f"{fault.name}: exit code {tested.returncode}, without {fault.says!r}:\n{written[-3000:]}"

    assert not failures(failure, FAULTS)


def test_a_fault_whose_text_is_gone_is_an_error(tmp_path) -> None:
    for fault in FAULTS:
        path = tmp_path / fault.path
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / fault.path, path)
        fault.put_into(tmp_path)
    with pytest.raises(AssertionError, match="must hold this text once, and holds it 0 times"):
        replace(FAULTS[0], before="no such text").put_into(tmp_path)
