"""Tells what the compiler made of the CUDA kernels (`make cuda-build`), and fails for what must not be.

    python cmake/kernel_report.py TREE

TREE/build.log is the output of builds with `-Xptxas=-v`. The report has registers, stack, spills and shared memory: a
line for each kernel template and architecture on standard output, and a line for each kernel in TREE/kernels.txt. What
ptxas said of each file moves from the log to TREE/build/ptxas/, because a later build compiles only what changed.

Exit code 1 if a kernel spills registers, or if a kernel of WIDE lacks 128-bit accesses to global memory. The latter is
read from the machine code by cuobjdump, of the environment or the toolkit.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Kernels that are to move 16 bytes a thread at a time, where memory is aligned so.
WIDE = {
    r"move_segments<": ("LDG", "STG"),
    r"sum_pieces<.+, ?true>": ("LDG", "STG"),
    r"update_segments<float, ?": ("LDG", "STG"),
    r"encode_groups<.*\bTensorRows<\w+<float\b.*>, ?float ?>": ("LDG",),
    r"encode_groups<.*\bSumOfRows<(?!OneBit|Int2)\w+<float\b": ("LDG", "STG"),
    r"decode_chunks<\S+<float\b": ("STG",),
    r"decode_add_chunks<\S+<float\b": ("LDG", "STG"),
}
NAMESPACES = re.compile(
    r"(?:gossamer|codec|flat|optim|sparse|cuda|device|\(anonymous namespace\)|_GLOBAL__N_\w+)::"
)


@dataclass(frozen=True)
class Kernel:
    """What ptxas said of one kernel for one architecture; the memory is in bytes."""

    name: str
    architecture: str
    registers: int
    stack: int
    spilled: int
    shared: int

    @property
    def template(self) -> str:
        return self.name.split("<")[0].split("(")[0]


def split_by_file(log: str) -> dict[str, str]:
    """Returns what the compiler printed for each .cu file, from ninja's output."""
    parts = re.split(r"^\[\d+/\d+\] (.*)$", log, flags=re.MULTILINE)
    return {name: text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name.endswith(".cu")}


def sources(tree: Path) -> list[str]:
    return [str(path.relative_to(tree)) for path in sorted((tree / "csrc").rglob("*.cu"))]


def remember(tree: Path) -> dict[str, str]:
    """Keeps what the log says of each file. Returns what is known of each file that is still there."""
    folder, log = tree / "build" / "ptxas", tree / "build.log"
    folder.mkdir(parents=True, exist_ok=True)
    if log.exists():
        for name, text in split_by_file(log.read_text()).items():
            (folder / name.replace("/", "-")).write_text(text)
        log.unlink()
    kept = {name: folder / name.replace("/", "-") for name in sources(tree)}
    for file in set(folder.iterdir()) - set(kept.values()):
        file.unlink()
    return {name: file.read_text() for name, file in kept.items() if file.exists()}


def kernels_of(text: str) -> list[Kernel]:
    """Returns the kernels of which ptxas -v tells."""
    pattern = (
        r"Compiling entry function '(?P<name>\S+)' for '(?P<architecture>\w+)'\n(?:.*\n)??"
        r"\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
        r".*Used (?P<registers>\d+) registers(?P<rest>.*)"
    )
    found = list(re.finditer(pattern, text))
    names = demangled(match["name"] for match in found)
    kernels = []
    for match, name in zip(found, names, strict=True):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        sizes = [int(match[key]) for key in ("registers", "stack")]
        spilled = int(match["stores"]) + int(match["loads"])
        kernels.append(Kernel(name, match["architecture"], *sizes, spilled, int(shared[1]) if shared else 0))
    return kernels


def demangled(names: Iterable[str]) -> list[str]:
    """Returns the names as they stand in the sources, without namespaces, return types and parameters."""
    command = ["c++filt"]
    text = subprocess.run(command, input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [_parameters_cut(NAMESPACES.sub("", line).removeprefix("void ")) for line in text.splitlines()]


def _parameters_cut(name: str) -> str:
    depth = 0
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:place]
    return name


def summary(kernels: Iterable[Kernel]) -> Iterator[str]:
    """Yields a line for each template and architecture."""
    groups = defaultdict(list)
    for kernel in kernels:
        groups[kernel.template, int(kernel.architecture.removeprefix("sm_").rstrip("af"))].append(kernel)
    yield f"{'kernel':<22} {'':>6} {'count':>5}  {'registers':>9} {'stack':>6} {'spilled':>7} {'shared':>6}"
    for (template, architecture), group in sorted(groups.items()):
        registers = sorted(kernel.registers for kernel in group)
        most = [max(getattr(kernel, name) for kernel in group) for name in ("stack", "spilled", "shared")]
        yield (
            f"{template:<22} sm_{architecture:<3} {len(group):>5}  {registers[0]:>4}-{registers[-1]:<4} "
            f"{most[0]:>6} {most[1]:>7} {most[2]:>6}"
        )


def wide_accesses(objects: Iterable[Path], architecture: str, cuobjdump: str) -> dict[str, set[str]]:
    """Returns for each kernel which of LDG and STG it has with 128 bits."""
    found: dict[str, set[str]] = {}
    for file in objects:
        command = [cuobjdump, "-sass", "-arch", architecture, str(file)]
        path = f"{Path(cuobjdump).parent}:{os.environ['PATH']}"  # it calls nvdisasm
        text = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}
        ).stdout
        parts = re.split(r"^\s*Function : (\S+)$", text, flags=re.MULTILINE)
        for name, code in zip(demangled(parts[1::2]), parts[2::2], strict=True):
            found[name] = set(re.findall(r"\b(LDG|STG)\.(?:\w+\.)*128\b", code))
    return found


def is_claimed(name: str) -> bool:
    return any(re.match(pattern, name) for pattern in WIDE)


def narrow(accesses: dict[str, set[str]]) -> Iterator[str]:
    """Yields what WIDE claims and the machine code does not show."""
    for pattern, wanted in WIDE.items():
        kernels = {name: wide for name, wide in accesses.items() if re.match(pattern, name)}
        if not kernels:
            yield f"WIDE names {pattern!r}, and no kernel is called so"
        for name, wide in kernels.items():
            for access in set(wanted) - wide:
                yield f"{name}: no 128-bit {access}"


def find_cuobjdump() -> str | None:
    """Returns the program of the environment (nvidia-cuda-cuobjdump), else that of the toolkit."""
    packages = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/cuobjdump"))
    return str(packages[-1]) if packages else shutil.which("cuobjdump")


def write_kernels(kernels: Iterable[Kernel], file: Path) -> None:
    lines = [
        f"{kernel.architecture} {kernel.registers} registers, {kernel.stack} B stack, {kernel.spilled} B spilled, "
        f"{kernel.shared} B shared: {kernel.name}\n"
        for kernel in sorted(kernels, key=lambda kernel: (kernel.name, kernel.architecture))
    ]
    file.write_text("".join(lines))


def check_accesses(by_file: dict[str, list[Kernel]], tree: Path) -> list[str]:
    """Returns what WIDE claims and the machine code does not show."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("128-bit accesses: not looked for, because cuobjdump is not on this machine")
        return []
    architectures = {kernel.architecture for group in by_file.values() for kernel in group}
    # Only files that have such kernels, because cuobjdump takes seconds for each.
    files = [name for name, group in by_file.items() if any(is_claimed(kernel.name) for kernel in group)]
    objects = [tree / "build" / "core" / f"{name.removeprefix('csrc/')}.o" for name in files]
    faults: list[str] = []
    for architecture in sorted(architectures, key=lambda name: int(re.sub(r"\D", "", name))):
        accesses = wide_accesses(objects, architecture, cuobjdump)
        found = [f"{architecture}: {finding}" for finding in narrow(accesses)]
        claimed = sum(is_claimed(name) for name in accesses)
        print(f"128-bit accesses for {architecture}: {claimed} kernels must have them, {len(found)} findings")
        faults += found
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="TREE")
    tree: Path = parser.parse_args().tree
    by_file = {name: kernels_of(text) for name, text in remember(tree).items()}
    kernels = [kernel for group in by_file.values() for kernel in group]
    if not kernels:
        print("kernel_report: the log names no kernel; build with -Xptxas=-v", file=sys.stderr)
        return 1
    write_kernels(kernels, tree / "kernels.txt")
    print("\n".join(summary(kernels)))
    print(f"registers: fewest and most; memory: most, in bytes. Each kernel: {tree / 'kernels.txt'}")
    faults = [f"{kernel.name} for {kernel.architecture} spills" for kernel in kernels if kernel.spilled]
    faults += check_accesses(by_file, tree)
    for fault in faults:
        print(f"kernel_report: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
