"""Builds gossamer._C against the installed torch. Metadata lives in pyproject.toml.

One run of ninja compiles everything. There are three compile groups. They differ in the headers that they may include,
and each has its own folder in build/:

    core    the Torch-free folders of csrc/; their objects fit every torch and every Python
    torch   the files with torch headers; the large headers are compiled once, into a precompiled header
    python  the bindings: for one torch and one Python

Each torch and each Python gets its own ninja file, but all runs share ninja's log. So a run with a second torch
compiles only the groups torch and python, and links them with the core that is there.

A compile unit is several files of one folder, which read the headers once. GOSSAMER_BUILD_CUDA=auto|0|1 chooses CUDA:
auto builds it when torch has CUDA and nvcc is found. MAX_JOBS limits the number of compilers that run at a time.

cmake/wheels.py imports this file for its groups, flags and ninja graph.
"""

import glob
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
GROUPS = {
    "core": ("adasum", "base", "codec", "flat", "kernels", "negotiate", "observe", "optim", "shm", "sparse"),
    "torch": ("backend", "comm", "collectives", "encoded", "route", "engine", "hook", "named", "."),
    "python": ("python",),
}
PRECOMPILED = "csrc/precompiled.h"
# Lines of the files of one unit, for each group. A unit then compiles in about ten seconds.
UNIT_LINES = {"core": 1100, "torch": 1100, "python": 150}
CXX_FLAGS = ["-O3", "-DNDEBUG", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden"]
# The files above the core do no arithmetic on elements, so -O2 loses nothing.
TORCH_FLAGS = ["-O2", "-std=c++20", "-fopenmp"]  # -fopenmp is for at::parallel_for
NVCC_FLAGS = ["-O3", "-std=c++17", "-DNDEBUG", "--fmad=false", "--expt-relaxed-constexpr"]
NVCC_FLAGS += ["-Xcompiler=-fPIC,-Wall,-Wextra,-fvisibility=hidden,-ffp-contract=off"]
INSTRUCTION_SETS = {  # the name of such a file, in any folder: its own flags, on x86-64
    "cpu_scalar.cpp": [],
    "cpu_neon.cpp": [],
    "cpu_avx2.cpp": ["-mavx2", "-mf16c", "-mfma"],
    "cpu_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"],
}
# The build takes those that nvcc knows, and adds PTX for the last of them.
CUDA_ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0+PTX", "10.0", "12.0")

if platform.system() != "Linux":
    raise SystemExit(
        f"setup.py: Gossamer must be installed on Linux, got {platform.system()}: its workers use Linux's shared "
        "memory and futexes. Install it in a Linux container, such as one of Docker Desktop; on Windows, WSL 2 will do."
    )


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def toolkit_root(nvcc: str) -> str:
    """Asks nvcc itself, because the nvcc on PATH may be a wrapper script outside the toolkit."""
    command = [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    match = re.search(r"^#\$ TOP=(.*)$", text, re.MULTILINE)
    return os.path.realpath(match[1].strip()) if match else str(Path(nvcc).resolve().parents[1])


def default_architectures(nvcc: str) -> str:
    listing = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    codes = {arch: f"compute_{arch.removesuffix('+PTX').replace('.', '')}" for arch in CUDA_ARCHITECTURES}
    known = [arch for arch in CUDA_ARCHITECTURES if codes[arch] in listing.split()]
    return ";".join(known).removesuffix("+PTX") + "+PTX"


def architecture_flags(nvcc: str) -> list[str]:
    architectures = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures(nvcc))
    flags = []
    for entry in architectures.replace(" ", ";").split(";"):
        match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", entry)
        if match is None:
            raise SystemExit(
                f"setup.py: TORCH_CUDA_ARCH_LIST must look like 8.0;9.0+PTX, got the entry {entry!r}."
            )
        number = match[1] + match[2]
        codes = [f"sm_{number}", f"compute_{number}"] if match[3] else [f"sm_{number}"]
        flags += [f"-gencode=arch=compute_{number},code={code}" for code in codes]
    return flags


def wanted_nvcc(torch_cuda: str | None) -> str | None:
    """Returns the nvcc to build CUDA's kernels with, or None for a build without them."""
    choice, nvcc = os.environ.get("GOSSAMER_BUILD_CUDA", "auto"), find_nvcc()
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"setup.py: GOSSAMER_BUILD_CUDA must be auto, 0 or 1, got {choice!r}.")
    if choice == "1" and not (torch_cuda and nvcc):
        missing = "nvcc was not found; put it on PATH" if torch_cuda else "the installed torch has no CUDA"
        raise SystemExit(f"setup.py: GOSSAMER_BUILD_CUDA=1 needs a torch with CUDA and nvcc: {missing}.")
    return nvcc if choice != "0" and torch_cuda else None


def find_ninja() -> str:
    found = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        raise SystemExit("setup.py: ninja was not found; run `pip install ninja`, then build again.")
    return found


def readme() -> str:
    """Returns README.md for a package index, where a relative link leads nowhere: its text remains."""
    return re.sub(r"!?\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", (ROOT / "README.md").read_text())


def import_torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            "setup.py: Gossamer is compiled against the torch it runs with, and torch cannot be imported here "
            f"({error}). Install what the build needs, then build without isolation:\n"
            "    pip install 'torch>=2.11' 'setuptools>=77' ninja\n"
            "    pip install --no-build-isolation ."
        ) from error
    return torch


def sources(group: str, *, cuda: bool = False) -> list[str]:
    """Returns the files of a group, with .cu files if asked."""
    patterns = ["csrc/*" if folder == "." else f"csrc/{folder}/**/*" for folder in GROUPS[group]]
    suffixes = (".cpp", ".cu") if cuda else (".cpp",)
    found = [path for pattern in patterns for path in glob.glob(pattern, root_dir=ROOT, recursive=True)]
    return sorted(path for path in found if path.endswith(suffixes))


def instruction_set(name: str) -> list[str]:
    """Returns a file's own flags. On other processors the files for x86-64 get none, and compile to nothing."""
    x86_64 = platform.machine().lower() in ("x86_64", "amd64")
    return INSTRUCTION_SETS.get(Path(name).name, []) if x86_64 else []


def headers() -> list[str]:
    found = (ROOT / "csrc").rglob("*")
    return sorted(
        str(path.relative_to(ROOT)) for path in found if path.suffix in (".h", ".inl", ".cuh", ".cu")
    )


def divide(paths: list[str], lines: int) -> list[list[str]]:
    """Divides files into units of about equal length, each of about this number of lines or fewer."""
    lengths = [len((ROOT / path).read_text().splitlines()) for path in paths]
    count = -(-sum(lengths) // lines)
    units: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for path, length in zip(paths, lengths, strict=True):
        middle = before + length / 2
        units[int(middle * count / sum(lengths))].append(path)
        before += length
    return [unit for unit in units if unit]


def units_of(paths: list[str], lines: int) -> dict[str, list[str]]:
    """Returns the files of each unit of a group, by the unit's name. A file with flags of its own is a unit alone."""
    units: dict[str, list[str]] = {}
    folders: dict[str, list[str]] = {}
    for path in paths:
        name = path.removeprefix("csrc/")
        if path.endswith(".cu") or Path(path).name in INSTRUCTION_SETS:
            units[name] = [path]
        else:
            folders.setdefault(name.rpartition("/")[0].partition("/")[0] or "csrc", []).append(path)
    for folder, files in folders.items():
        for number, part in enumerate(divide(files, lines), 1):
            units[part[0].removeprefix("csrc/") if len(part) == 1 else f"{folder}-{number}.cpp"] = part
    return units


def write(path: Path, text: str) -> None:
    """Writes the text, unless the file holds it already: ninja looks at the time of the last change."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def torch_flags(folder: Path) -> list[str]:
    """Returns the flags for files with torch headers, which lie below torch's folder."""
    paths = (folder / "include", folder / "include/torch/csrc/api/include")
    # torch's own headers raise no warnings, because they are in system directories.
    return [*CXX_FLAGS, *TORCH_FLAGS, *(f"-isystem{path}" for path in paths)]


def python_flags(folder: Path, include: str) -> list[str]:
    """Returns the flags for the bindings. ``include``: where Python's headers are.

    They optimise as those of ``torch_flags`` do: from GCC 13 on a precompiled header fits no other level.
    """
    return [*torch_flags(folder), "-DTORCH_EXTENSION_NAME=_C", f"-isystem{include}"]


def libraries(folder: Path) -> list[str]:
    # torch's OpenMP library has the threads of -fopenmp, so the linker does not get that flag.
    return [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]


def cuda_libraries(nvcc: str) -> list[str]:
    return [f"-L{toolkit_root(nvcc)}/lib64", "-lcudart"]


RULES = """ninja_required_version = 1.5
builddir = build
rule cxx
  command = {cxx} -MMD -MF $out.d -Icsrc $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $files
rule nvcc
  command = {nvcc} -MMD -MF $out.d -Icsrc $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $files
rule link
  command = {cxx} -shared $in -o $out $flags
  description = link $out
"""


class Graph:
    """A ninja file: the rules, and each object and library with its inputs. All paths in it are relative to ROOT."""

    def __init__(self, nvcc: str | None) -> None:
        self.nvcc = nvcc
        self.lines = [RULES.format(cxx=os.environ.get("CXX", "c++"), nvcc=nvcc)]
        self.nvcc_flags = [*NVCC_FLAGS, *architecture_flags(nvcc)] if nvcc else []

    def add(
        self, rule: str, output: str, inputs: list[str], flags: list[str], *, after: str = "", shown: str = ""
    ) -> str:
        """Adds a file to build, and returns its path.

        Args:
            after: a file that must exist first, and is no input.
            shown: what ninja prints for it.
        """
        needs = f" | {after}" if after else ""
        self.lines.append(f"build {output}: {rule} {' '.join(inputs)}{needs}")
        self.lines += [f"  flags = {shlex.join(flags)}", f"  files = {shown or ' '.join(inputs)}"]
        return output

    def precompile(self, folder: str, flags: list[str]) -> str:
        """Adds torch's large headers. Returns the header for ``compile``."""
        header = f"{folder}/{Path(PRECOMPILED).name}"
        self.add("cxx", f"{header}.gch", [PRECOMPILED], [*flags, "-x", "c++-header"])
        return header

    def compile(
        self, folder: str, units: dict[str, list[str]], flags: list[str], *, header: str = ""
    ) -> list[str]:
        """Adds an object for each unit, in the folder. Returns their paths. .cu files get nvcc's flags instead."""
        objects = []
        for name, files in units.items():
            source, rule, own = files[0], "cxx", [*flags, *instruction_set(name)]
            if len(files) > 1:
                source = f"{folder}/{name}"
                write(ROOT / source, "".join(f'#include "{file.removeprefix("csrc/")}"\n' for file in files))
            if name.endswith(".cu"):
                rule, own = "nvcc", self.nvcc_flags
            elif header:
                own += ["-Winvalid-pch", "-include", header]
            after = f"{header}.gch" if header else ""
            output = f"{folder}/{name}.o"
            objects.append(self.add(rule, output, [source], own, after=after, shown=" ".join(files)))
        return objects

    def run(self, file: str) -> None:
        """Writes the ninja file, and builds everything in it."""
        write(ROOT / file, "\n".join([*self.lines, ""]))
        jobs = [f"-j{os.environ['MAX_JOBS']}"] if os.environ.get("MAX_JOBS") else []
        if subprocess.run([find_ninja(), "-f", file, *jobs], cwd=ROOT, check=False).returncode:
            raise SystemExit("setup.py: the compiler's messages are above.")


def describe() -> tuple[Graph, str, str]:
    """Returns the graph for this torch and this Python, a name for its file, and the module that it makes."""
    torch = import_torch()
    nvcc, place = wanted_nvcc(torch.version.cuda), Path(torch.__file__).parent
    built_for = f"torch{torch.__version__}{'-cuda' if nvcc else ''}"
    python = f"{built_for}-{sysconfig.get_config_var('SOABI') or sysconfig.get_python_version()}"
    flags = {
        "core": [*CXX_FLAGS, "-std=c++17"],
        "torch": torch_flags(place),
        "python": python_flags(place, sysconfig.get_path("include")),
    }
    graph, objects = Graph(nvcc), []
    header = graph.precompile(f"build/{built_for}", flags["torch"])
    for group, folder in (("core", "core"), ("torch", built_for), ("python", python)):
        units = units_of(sources(group, cuda=nvcc is not None), UNIT_LINES[group])
        used = "" if group == "core" else header
        objects += graph.compile(f"build/{folder}", units, flags[group], header=used)
    linked = [*libraries(place), *(cuda_libraries(nvcc) if nvcc else [])]
    module = graph.add("link", f"build/{python}/_C.so", objects, linked)
    return graph, f"build/{python}.ninja", module


class BuildGossamer(build_ext):
    def build_extension(self, ext: Extension) -> None:
        graph, file, module = describe()
        graph.run(file)
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        self.copy_file(str(ROOT / module), target)


if __name__ == "__main__":
    wanted_nvcc(import_torch().version.cuda)  # says what is missing before anything is built
    every = [path for group in GROUPS for path in sources(group)]
    setup(
        # The source distribution holds the headers because the extension depends on them.
        ext_modules=[Extension("gossamer._C", every, depends=headers())],
        cmdclass={"build_ext": BuildGossamer},
        long_description=readme(),
        long_description_content_type="text/markdown",
    )
