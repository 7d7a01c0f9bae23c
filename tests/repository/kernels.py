"""Builds the CUDA kernels for the host, under sanitizers, with tests/cpp/cuda/emulator in place of CUDA's header.

It needs g++ and GNU ld alone: neither CMake nor GoogleTest, so that a changed kernel is compiled and tested in seconds.
"""

import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests import ROOT

FOLDERS = ("codec", "flat", "optim", "sparse")
EMULATOR = "tests/cpp/cuda/emulator"
INCLUDES = ("csrc", EMULATOR, "tests/cpp", "tests/cpp/cuda/without_googletest")
COMMON = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
SANITIZED = (
    "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-Wno-unknown-pragmas",
    # They halve the time to compile: AddressSanitizer sees null and wild pointers too, and its checks may be calls.
    "-fno-sanitize=null,object-size,pointer-overflow", "--param=asan-instrumentation-with-call-threshold=0",
    "-fira-algorithm=priority",
    "-fdata-sections",  # for shared.ld
    "-DGOSSAMER_MAX_GRID=4",  # so that blocks take several pieces
)  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """A file to compile.

    Args:
        source: its path in the tree.
        flags: besides those of its kind.
        sanitized: whether sanitizers look at it.
        name: of the object, without its suffix. shared.ld looks at objects that end in .cu.o.
        faulty: whether the source is that of the tree with faults.
    """

    source: str
    flags: tuple[str, ...] = ()
    sanitized: bool = True
    name: str = ""
    faulty: bool = False

    def object(self, folder: Path) -> Path:
        return folder / f"{self.name or self.source.replace('/', '-')}.o"


def units_of(suffix: str, *, sanitized: bool) -> tuple[Unit, ...]:
    paths = (path for folder in FOLDERS for path in sorted((ROOT / "csrc" / folder).glob(f"*{suffix}")))
    return tuple(Unit(str(path.relative_to(ROOT)), sanitized=sanitized) for path in paths)


KERNELS = units_of(".cu", sanitized=True)
# What the kernels are compared with. test_cpp.py tests it under sanitizers.
REFERENCE = units_of(".cpp", sanitized=False)
SCHEDULER = Unit(f"{EMULATOR}/emulator.cpp", ("-O2",), sanitized=False)
COMPARISON = Unit("tests/cpp/cuda/test_cuda.cpp")
# Ranks that meet in memory of the host, each in a process.
HOST_MEMORY = Unit(f"{EMULATOR}/test_host_memory.cpp")
SHARED_MEMORY = Unit("csrc/shm/memory.cpp", sanitized=False)
OWN_TESTS = Unit(f"{EMULATOR}/test_emulator.cpp", name="test_emulator.cu")


def only(*codecs: str) -> tuple[str, ...]:
    """Flags that compile the kernels of these codecs, which are written as in codec_list.h."""
    listed = " ".join(f"CODEC({codec})" for codec in codecs)
    return (
        f"-include{ROOT / EMULATOR / 'only.h'}",
        "-DGOSSAMER_ISA=device",
        f"-DGOSSAMER_ONLY_CODEC(CODEC)={listed}",
    )


# The program that counts bytes and launches. -fsanitize=thread puts calls before accesses, which traffic.cpp defines.
# Without -fno-tree-sra a vector load may become four loads.
INT8, INT4, ONEBIT = "3, int8, Int8", "5, int4, Int4", "6, onebit, OneBit"
COUNTED_FLAGS = ("-fsanitize=thread", "-fno-tree-sra", "-fdata-sections", "-w", *only(INT8, INT4))
FLOAT32 = "csrc/codec/cuda_f32.cu"  # holds the kernels of csrc/codec's headers
TRAFFIC = (
    *(
        Unit(source, COUNTED_FLAGS, sanitized=False, name=f"counted-{source.replace('/', '-')}")
        for source in (FLOAT32, "csrc/flat/flat_cuda.cu")
    ),
    *(Unit(f"{EMULATOR}/{name}.cpp", sanitized=False) for name in ("traffic", "test_traffic")),
    SCHEDULER,
    *REFERENCE,
)

ALL = (*KERNELS, COMPARISON, SCHEDULER, *REFERENCE)
RANKS = (*KERNELS, HOST_MEMORY, SHARED_MEMORY, SCHEDULER, *REFERENCE)
PROGRAMS = {"kernels": ALL, "ranks": RANKS, "emulator": (OWN_TESTS, SCHEDULER), "traffic": TRAFFIC}


def with_faults(units: Sequence[Unit], sources: Collection[str]) -> tuple[Unit, ...]:
    """The units, where those of `sources` have faults. Kernels of codecs are then compiled for two of the codecs."""

    def changed(unit: Unit) -> Unit:
        flags = [*unit.flags, "-w", f"-include{ROOT / EMULATOR / 'faults.h'}"]
        if unit.source == FLOAT32 and unit.sanitized:
            flags += only(INT8, ONEBIT)
        name = f"faulty-{'' if unit.sanitized else 'counted-'}{Path(unit.source).stem}.cu"
        return replace(unit, flags=tuple(flags), name=name, faulty=True)

    return tuple(changed(unit) if unit.source in sources else unit for unit in units)


def run(
    *command: str | Path, timeout_s: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    variables = {**os.environ, **environment}
    return subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=timeout_s, env=variables
    )


def compile_unit(unit: Unit, folder: Path, faulty: Path = ROOT) -> None:
    """Compiles a unit into `folder`. `faulty` is the tree with faults; headers that it lacks are the checkout's."""
    tree = faulty if unit.faulty else ROOT
    includes = [f"-I{path}" for path in (tree / "csrc", *(ROOT / name for name in INCLUDES))]
    flags = [*COMMON, *(SANITIZED if unit.sanitized else ()), *unit.flags, *includes]
    compiled = run("g++", *flags, "-x", "c++", "-c", tree / unit.source, "-o", unit.object(folder))
    assert compiled.returncode == 0, compiled.stderr[-6000:]


def compile_units(units: Sequence[Unit], folder: Path, faulty: Path = ROOT) -> None:
    """Compiles two at a time. The first should be those that take the longest."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda unit: compile_unit(unit, folder, faulty), units))


def link(objects: Sequence[Path], program: Path) -> None:
    script = f"-Wl,-T,{ROOT / EMULATOR / 'shared.ld'}"
    linked = run("g++", "-fsanitize=address,undefined", *objects, script, "-o", program)
    assert linked.returncode == 0, linked.stderr[-6000:]
