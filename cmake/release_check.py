"""Checks what would be released (`make release-check`): the wheels and the source distribution in dist/.

    python cmake/release_check.py --python PYTHON [--build-sdist]

It installs the wheel into an environment of its own, where torch and the other dependencies are links into PYTHON's
packages, and no compiler or checkout is used. There it trains, runs some rooms of the tests from a copy, and
checks the types. If dist/ has the wheel of CUDA kernels, it loads them there. It also checks the version, the
changelog, the text for the package index, and that the source distribution holds every file that a build needs.
``--build-sdist`` compiles the source distribution too.

Needs twine and pyright in the Python that runs this file.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "release"
ROOMS = (
    "codec/test_codecs.py",
    "comm/test_collectives.py",
    "engine/test_steps.py",
    "backend/test_registration.py",
)
LEAST_TYPES = 97.0  # percent of public symbols with a known type, by pyright
MOST_MEGABYTES = 30.0


def run(*command: str | Path, cwd: Path = WORK, env: dict[str, str] | None = None, code: int = 0) -> str:
    """Runs a command without the checkout on any path. Returns its output."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode > code:
        raise SystemExit(f"release-check: {' '.join(map(str, command))} failed:\n{result.stdout[-6000:]}")
    return result.stdout


def require(ok: bool, what: str) -> None:
    """Prints what was checked, or ends the check with it."""
    if not ok:
        raise SystemExit(f"release-check: FAILED: {what}")
    print(f"release-check: {what}", flush=True)


def version() -> str:
    """The one place of the version, which the changelog must have too."""
    text = (ROOT / "python" / "gossamer" / "__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    require(found in headings, f"CHANGELOG.md has the version {found}")
    return found


def environment(python: str, site_packages: Path) -> Path:
    """Makes an environment where pip, setuptools and the dependencies are links. Returns its Python."""
    folder = WORK / "venv"
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", "--without-pip", folder)
    (own,) = folder.glob("lib/python3*/site-packages")
    for entry in site_packages.iterdir():
        link = own / entry.name
        if "gossamer" not in entry.name and entry.suffix != ".pth" and not link.exists():
            link.symlink_to(entry)
    return folder / "bin" / "python"


def check_wheel(wheel: Path, python: Path, expected: str, most_seconds: float) -> None:
    """Installs the wheel and trains one step of the demo, against the clock."""
    megabytes = wheel.stat().st_size / 1e6
    require(megabytes <= MOST_MEGABYTES, f"{wheel.name}: {megabytes:.1f} MB, at most {MOST_MEGABYTES:.0f}")
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    policy = re.search(r'"(manylinux_\w+)"', " ".join(shown.split()))
    require(policy is not None, f"auditwheel: {policy[1] if policy else shown}")
    begin = time.monotonic()
    run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel)
    installed = time.monotonic() - begin
    demo = ["--steps", "1", "--ranks", "2", "--link-steps", "0", "--no-plot"]
    run(python, "-m", "gossamer", "demo", *demo, code=1)  # after one step the losses need not agree
    total = time.monotonic() - begin
    require(
        total <= most_seconds,
        f"installed in {installed:.1f} s, one step of every run of the demo after {total:.1f} s",
    )
    shown = run(python, "-m", "gossamer", "--version").strip()
    file = run(python, "-c", "import gossamer; print(gossamer._C.__file__)").strip()
    require(shown == f"gossamer {expected}", f"the installed package is {shown}")
    require("site-packages/gossamer/_native/" in file, f"it loads {Path(file).name}")


def check_tests(python: Path) -> None:
    """Runs rooms of the tests from a copy that has no package beside it."""
    copy = WORK / "tests"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "tests", copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", WORK)  # pytest's settings
    output = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{room}" for room in ROOMS))
    require(" passed" in output, f"tests of the installed package: {output.strip().splitlines()[-1]}")


def check_kernels(wheel: Path, python: Path) -> None:
    """Installs the wheel of CUDA kernels. They load where torch is built for CUDA, and nowhere else."""
    ask = "import gossamer, torch; print(gossamer._C.with_cuda, torch.version.cuda is not None, torch.__version__)"
    before, cuda, torch = run(python, "-c", ask).split()
    run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel)
    after = run(python, "-c", ask).split()[0]
    megabytes = wheel.stat().st_size / 1e6
    require(megabytes <= MOST_MEGABYTES, f"{wheel.name}: {megabytes:.1f} MB, at most {MOST_MEGABYTES:.0f}")
    require(
        (before, after) == ("False", cuda),
        f"with torch {torch} and this wheel, gossamer._C.with_cuda is {after}",
    )


def check_types(python: Path) -> None:
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # pyright asks the first python on PATH
    command = [sys.executable, "-m", "pyright", "--verifytypes", "gossamer", "--ignoreexternal"]
    output = run(*command, env={"PATH": path}, code=1)
    score = float(re.findall(r"completeness score: ([\d.]+)%", output)[0])
    require(score >= LEAST_TYPES, f"pyright knows the types of {score} % of the public symbols")


def check_sdist(python: Path, expected: str, compile_it: bool) -> None:
    """Makes the source distribution, and compiles it if asked, against the torch of the environment."""
    shutil.rmtree(WORK / "sdist", ignore_errors=True)
    run(python, "setup.py", "--quiet", "sdist", "--dist-dir", WORK / "sdist", cwd=ROOT)
    (archive,) = (WORK / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {"/".join(name.split("/")[1:]) for name in opened.getnames()}
        opened.extractall(WORK / "sdist", filter="data")
    wanted = set(run("git", "ls-files", "csrc", "python", "setup.py", "pyproject.toml", cwd=ROOT).split())
    missing = sorted(path for path in wanted - held if not path.endswith(".md"))
    require(missing == [], f"{archive.name} holds what a build needs ({missing or len(wanted)} files)")
    if compile_it:
        source = WORK / "sdist" / f"gossamer-{expected}"
        command = [
            python,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            WORK / "sdist",
            source,
        ]
        begin = time.monotonic()
        run(*command, env={"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})  # ninja
        (wheel,) = (WORK / "sdist").glob("*.whl")
        require(True, f"the source distribution compiles to {wheel.name} in {time.monotonic() - begin:.0f} s")
    shutil.copy(archive, ROOT / "dist")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--python", type=Path, required=True, help="a Python that has torch, for links into it"
    )
    parser.add_argument(
        "--build-sdist", action="store_true", help="compile the source distribution too; minutes"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for installing and one step of the demo (60)"
    )
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    expected = version()
    ask = "import sys, sysconfig as s; print('cp%d%d' % sys.version_info[:2], s.get_path('purelib'))"
    asked, packages = run(arguments.python, "-c", ask).split()
    wheels = list((ROOT / "dist").glob(f"gossamer-{expected}-{asked}-*manylinux*.whl"))
    require(len(wheels) == 1, f"dist/ has one wheel for {asked}: {[wheel.name for wheel in wheels]}")
    python = environment(str(arguments.python), Path(packages))
    check_wheel(wheels[0], python, expected, arguments.seconds)
    check_tests(python)
    for kernels in (ROOT / "dist").glob(f"gossamer_cuda*-{expected}-*manylinux*.whl"):
        check_kernels(kernels, python)
    check_sdist(python, expected, arguments.build_sdist)
    files = sorted((ROOT / "dist").glob(f"gossamer*-{expected}*"))
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    require(True, f"twine check: {', '.join(path.name for path in files)}")
    check_types(python)


if __name__ == "__main__":
    main()
