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

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
GROUPS = {
    "core": ("adasum", "base", "codec", "flat", "negotiate", "observe", "optim", "shm"),
    "torch": ("backend", "comm", "collectives", "route", "engine", "hook", "named", "."),
    "python": ("python",),
}
PRECOMPILED = "csrc/precompiled.h"
# Lines of the files of one unit, for each group. A unit then compiles in about ten seconds.
UNIT_LINES = {"core": 1100, "torch": 1100, "python": 150}
CXX_FLAGS = ["-O3", "-DNDEBUG", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden"]
# The files above the core do no arithmetic on elements, so -O2 loses nothing.
TORCH_FLAGS = ["-O2", "-std=c++20", "-fopenmp"]  # -fopenmp is for at::parallel_for
NVCC_FLAGS = ["-DNDEBUG", "--fmad=false", "--expt-relaxed-constexpr"]
NVCC_FLAGS += ["-Xcompiler=-fPIC,-Wall,-Wextra,-fvisibility=hidden,-ffp-contract=off"]
INSTRUCTION_SETS = {  # the name of such a file, in any folder: its own flags
    "cpu_scalar.cpp": [],
    "cpu_avx2.cpp": ["-mavx2", "-mf16c", "-mfma"],
    "cpu_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"],
}
# The build takes those that nvcc knows, and adds PTX for the last of them.
CUDA_ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0+PTX", "10.0", "12.0")


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


def architecture_flags() -> list[str]:
    flags = []
    for entry in os.environ["TORCH_CUDA_ARCH_LIST"].replace(" ", ";").split(";"):
        match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", entry)
        if match is None:
            raise SystemExit(
                f"setup.py: TORCH_CUDA_ARCH_LIST must look like 8.0;9.0+PTX, got the entry {entry!r}."
            )
        number = match[1] + match[2]
        codes = [f"sm_{number}", f"compute_{number}"] if match[3] else [f"sm_{number}"]
        flags += [f"-gencode=arch=compute_{number},code={code}" for code in codes]
    return flags


def wants_cuda(torch_cuda: str | None, nvcc: str | None) -> bool:
    choice = os.environ.get("GOSSAMER_BUILD_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"setup.py: GOSSAMER_BUILD_CUDA must be auto, 0 or 1, got {choice!r}.")
    if choice == "1" and not (torch_cuda and nvcc):
        missing = "nvcc was not found; put it on PATH" if torch_cuda else "the installed torch has no CUDA"
        raise SystemExit(f"setup.py: GOSSAMER_BUILD_CUDA=1 needs a torch with CUDA and nvcc: {missing}.")
    return choice != "0" and bool(torch_cuda and nvcc)


def find_ninja() -> str:
    found = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        raise SystemExit("setup.py: ninja was not found; run `pip install ninja`, then build again.")
    return found


try:
    import torch
except ImportError as error:
    raise SystemExit(
        "setup.py: Gossamer is compiled against the torch it runs with, and torch cannot be imported here "
        f"({error}). Install what the build needs, then build without isolation:\n"
        "    pip install 'torch>=2.11' 'setuptools>=77' ninja\n"
        "    pip install --no-build-isolation ."
    ) from error

NVCC = find_nvcc()
WITH_CUDA = wants_cuda(torch.version.cuda, NVCC)
if WITH_CUDA:
    os.environ["CUDA_HOME"] = toolkit_root(NVCC)  # torch.utils.cpp_extension reads it at its import
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures(NVCC))

from torch.utils.cpp_extension import include_paths, library_paths  # noqa: E402


def sources() -> list[str]:
    patterns = [
        pattern
        for folder in sum(GROUPS.values(), ())
        for pattern in (["csrc/*"] if folder == "." else [f"csrc/{folder}/**/*"])
    ]
    suffixes = (".cpp", ".cu") if WITH_CUDA else (".cpp",)
    found = [path for pattern in patterns for path in glob.glob(pattern, root_dir=ROOT, recursive=True)]
    x86_64 = platform.machine().lower() in ("x86_64", "amd64")
    return sorted(
        path
        for path in found
        if path.endswith(suffixes) and (x86_64 or not INSTRUCTION_SETS.get(Path(path).name))
    )


def headers() -> list[str]:
    found = (ROOT / "csrc").rglob("*")
    return sorted(
        str(path.relative_to(ROOT)) for path in found if path.suffix in (".h", ".inl", ".cuh", ".cu")
    )


def group_of(path: str) -> str:
    folder = "." if len(Path(path).parts) == 2 else Path(path).parts[1]
    (group,) = (name for name, folders in GROUPS.items() if folder in folders)
    return group


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


def units_of(paths: list[str]) -> dict[str, list[str]]:
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
        for number, part in enumerate(divide(files, UNIT_LINES[group_of(files[0])]), 1):
            units[part[0].removeprefix("csrc/") if len(part) == 1 else f"{folder}-{number}.cpp"] = part
    return units


def write(path: Path, text: str) -> None:
    """Writes the text, unless the file holds it already: ninja looks at the time of the last change."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def group_flags() -> dict[str, list[str]]:
    """Returns the compiler's flags for the .cpp files of each group, and nvcc's for its .cu files as "core_cu"."""
    paths = include_paths("cuda" if WITH_CUDA else "cpu")
    # torch's own headers raise no warnings, because they are in system directories.
    torch_flags = [*CXX_FLAGS, *TORCH_FLAGS, *(f"-isystem{path}" for path in paths)]
    python = ["-DTORCH_EXTENSION_NAME=_C", f"-isystem{sysconfig.get_path('include')}"]
    flags = {
        "core": [*CXX_FLAGS, "-std=c++17"],
        "torch": torch_flags,
        "python": [*torch_flags, "-O1", *python],
    }
    if WITH_CUDA:
        flags["python"].append("-DGOSSAMER_WITH_CUDA")
        nvcc = [*NVCC_FLAGS, *architecture_flags()]
        flags["core_cu"] = ["-O3", "-std=c++17", *nvcc]
        flags["torch_cu"] = ["-O3", "-std=c++20", *nvcc, *(f"-isystem={path}" for path in paths)]
    return flags


def libraries() -> list[str]:
    # torch's OpenMP library has the threads of -fopenmp, so the linker does not get that flag.
    names = ["c10", "torch", "torch_cpu", "torch_python"]
    if WITH_CUDA:
        names += ["cudart", "c10_cuda", "torch_cuda"]
    folders = library_paths("cuda" if WITH_CUDA else "cpu")
    return [*(f"-L{folder}" for folder in folders), *(f"-l{name}" for name in names)]


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


def write_ninja() -> tuple[str, str]:
    """Writes the ninja file for this torch and this Python. Returns its path, and that of the module that it makes.

    All paths in it are relative to ROOT.
    """
    built_for = f"torch{torch.__version__}{'-cuda' if WITH_CUDA else ''}"
    python = f"{built_for}-{sysconfig.get_config_var('SOABI') or sysconfig.get_python_version()}"
    folders = {"core": "build/core", "torch": f"build/{built_for}", "python": f"build/{python}"}
    lines = [RULES.format(cxx=os.environ.get("CXX", "c++"), nvcc=NVCC)]
    lines += [f"{group}_flags = {shlex.join(flags)}" for group, flags in group_flags().items()]

    header = f"{folders['torch']}/{Path(PRECOMPILED).name}"
    lines.append(f"build {header}.gch: cxx {PRECOMPILED}")
    lines += ["  flags = $torch_flags -x c++-header", f"  files = {PRECOMPILED}"]
    paths: dict[str, list[str]] = {group: [] for group in GROUPS}
    for path in sources():
        paths[group_of(path)].append(path)
    objects = []
    for group, folder in folders.items():
        for name, files in units_of(paths[group]).items():
            source, rule, flags, needs = files[0], "cxx", f"${group}_flags", ""
            if len(files) > 1:
                source = f"{folder}/{name}"
                write(ROOT / source, "".join(f'#include "{file.removeprefix("csrc/")}"\n' for file in files))
            if name.endswith(".cu"):
                rule, flags = "nvcc", f"${group}_cu_flags"
            elif group == "core":
                flags = " ".join([flags, *INSTRUCTION_SETS.get(Path(name).name, [])])
            else:
                flags, needs = f"{flags} -Winvalid-pch -include {header}", f" | {header}.gch"
            objects.append(f"{folder}/{name}.o")
            lines.append(f"build {objects[-1]}: {rule} {source}{needs}")
            lines += [f"  flags = {flags}", f"  files = {' '.join(files)}"]
    module = f"{folders['python']}/_C.so"
    lines += [f"build {module}: link {' '.join(objects)}", f"  flags = {shlex.join(libraries())}", ""]
    write(ROOT / f"build/{python}.ninja", "\n".join(lines))
    return f"build/{python}.ninja", module


class BuildGossamer(build_ext):
    def build_extension(self, ext: Extension) -> None:
        file, module = write_ninja()
        jobs = [f"-j{os.environ['MAX_JOBS']}"] if os.environ.get("MAX_JOBS") else []
        if subprocess.run([find_ninja(), "-f", file, *jobs, module], cwd=ROOT, check=False).returncode:
            raise SystemExit("setup.py: the compiler's messages are above.")
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        self.copy_file(str(ROOT / module), target)


setup(
    # The source distribution holds the headers because the extension depends on them.
    ext_modules=[Extension("gossamer._C", sources(), depends=headers())],
    cmdclass={"build_ext": BuildGossamer},
)
