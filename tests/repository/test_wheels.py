# Wheels: which library the package loads for the torch that is installed, and what `make wheel` says is missing. The
# wheels themselves are built and tried by `make release-check`.

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gossamer
from gossamer._native import choose, cuda_kernels
from tests import ROOT
from tests.repository.test_repo import TORCH_FREE

SUFFIX = ".cpython-312-x86_64-linux-gnu.so"
OTHER = ".cpython-310-x86_64-linux-gnu.so"


@pytest.fixture
def folder(tmp_path) -> Path:
    names = [f"_C_torch{minor}{SUFFIX}" for minor in ("2_9", "2_11", "2_13")]
    for name in [*names, f"_C_torch2_15{OTHER}", "_C_torch2_14_x{SUFFIX}", "libgossamer_core.so"]:
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    """cmake/wheels.py as a module."""
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "cmake" / "wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.13.0+cpu", "_C_torch2_13"),
        ("2.13.4", "_C_torch2_13"),
        ("2.13.0a0+git12ab", "_C_torch2_13"),
        ("2.11.0+cu130", "_C_torch2_11"),
    ],
)
def test_library_fits_the_minor_version_of_torch(folder, version, name) -> None:
    assert choose(folder, SUFFIX, version).name == name + SUFFIX


@pytest.mark.parametrize("version", ["2.12.0", "2.14.0", "2.15.0", "3.13.0", "unknown"])
def test_a_torch_without_a_library_is_an_error_that_says_which_there_are(folder, version) -> None:
    with pytest.raises(ImportError) as caught:
        choose(folder, SUFFIX, version)
    message = str(caught.value)
    assert "a library for (2.9, 2.11, 2.13), got torch " + version in message
    assert message.count("pip install --no-build-isolation .") == 1


def test_a_package_without_libraries_says_so(tmp_path) -> None:
    with pytest.raises(ImportError, match="it has none"):
        choose(tmp_path, SUFFIX, "2.13.0")


@pytest.fixture
def kernels(tmp_path, monkeypatch) -> Callable[[str], Path]:
    """Installs a wheel of CUDA kernels with a version. Returns its library."""

    def install(version: str) -> Path:
        package = tmp_path / "gossamer_cuda13"
        package.mkdir()
        (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "gossamer_cuda13", raising=False)
        return package / "libgossamer_cuda13.so"

    yield install
    sys.modules.pop("gossamer_cuda13", None)


def test_cuda_kernels_are_those_of_their_wheel_where_torch_has_cuda(kernels) -> None:
    assert cuda_kernels("13.0") is None
    library = kernels(gossamer.__version__)
    assert cuda_kernels("13.0") == cuda_kernels("13.2") == library
    assert cuda_kernels(None) is None


def test_cuda_kernels_of_another_version_are_refused(kernels) -> None:
    kernels("0.0.9")
    assert cuda_kernels(None) is None
    with pytest.raises(gossamer.ConfigError) as caught:
        cuda_kernels("13.0")
    assert f"must have gossamer's version, {gossamer.__version__}, got 0.0.9;" in str(caught.value)


def test_cuda_kernels_for_another_cuda_are_refused(kernels) -> None:
    kernels(gossamer.__version__)
    with pytest.raises(
        gossamer.ConfigError, match=r"gossamer-cuda13 needs a torch for CUDA 13, got torch .* for CUDA 12\.6;"
    ):
        cuda_kernels("12.6")


def package_of_a_wheel(folder: Path, minor: str) -> dict[str, str]:
    """Copies the package as a wheel for one minor of torch would hold it. Returns the environment that finds it."""
    package = Path(gossamer.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "_C*.so", "_C_torch*.so")
    shutil.copytree(package, folder / "gossamer", ignore=ignored)
    library = folder / "gossamer" / "_native" / f"_C_torch{minor}{EXTENSION_SUFFIXES[0]}"
    shutil.copy(str(gossamer._C.__file__), library)
    return {**os.environ, "PYTHONPATH": str(folder)}


def imported(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = "import gossamer, gossamer._C as native; print(native.__file__, native is gossamer._C)"
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, cwd=env["PYTHONPATH"]
    )


def test_a_package_of_a_wheel_loads_the_library_of_the_installed_torch(tmp_path) -> None:
    minor = "_".join(torch.__version__.split(".")[:2])
    result = imported(package_of_a_wheel(tmp_path, minor))
    assert result.returncode == 0, result.stderr
    file, same = result.stdout.split()
    assert Path(file).parent == tmp_path / "gossamer" / "_native"
    assert Path(file).name.startswith(f"_C_torch{minor}.")
    assert same == "True"


def test_import_with_another_torch_ends_with_the_advice(tmp_path) -> None:
    result = imported(package_of_a_wheel(tmp_path, "9_9"))
    assert result.returncode == 1
    assert f"a library for (9.9), got torch {torch.__version__}" in result.stderr.splitlines()[-1]


def test_torch_is_found_by_its_version_file_wherever_it_was_unpacked(wheels, tmp_path) -> None:
    for place, version in (("a/lib/python3.11/site-packages", "2.11.0+cu130"), ("v2.14", "2.14.1")):
        (tmp_path / place / "torch").mkdir(parents=True)
        (tmp_path / place / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    packages = tmp_path / "a/lib/python3.11/site-packages"
    assert wheels.find_torch("2.11", [tmp_path]).folder == packages / "torch"
    assert wheels.find_torch("2.14", [tmp_path]).folder == tmp_path / "v2.14" / "torch"
    assert wheels.find_torch("2.1", [tmp_path]) is None


def test_a_torch_below_a_relative_folder_is_named_by_its_absolute_path(wheels, tmp_path, monkeypatch) -> None:
    (tmp_path / "v2.15" / "torch").mkdir(parents=True)
    (tmp_path / "v2.15" / "torch" / "version.py").write_text("__version__ = '2.15.0'\n")
    monkeypatch.chdir(tmp_path)
    assert wheels.find_torch("2.15", [Path("v2.15")]).folder == tmp_path / "v2.15" / "torch"


def test_what_is_missing_is_named_with_what_to_do(wheels) -> None:
    lines = wheels.survey("torch", ["2.11", "2.12", "2.13"], ["found", None, "found"], "install {0}")
    assert lines == ["wheels: no torch 2.12 on this machine; install 2.12"]


def test_this_python_is_found(wheels) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = wheels.find_python(version)
    assert found is not None
    assert wheels.library_name("2.13", found.soabi) == f"_C_torch2_13.{found.soabi}.so"
    assert EXTENSION_SUFFIXES[0] == f".{found.soabi}.so"
    assert wheels.find_python("2.0") is None


def test_core_of_a_wheel_is_the_torch_free_folders(wheels) -> None:
    assert wheels.native.GROUPS["core"] == TORCH_FREE


def libraries_of(wheels: ModuleType, nvcc: str | None) -> dict[str, set[str]]:
    """Returns the libraries of two Pythons and two torches by name, each with the folders of what it is linked from."""
    pythons = [wheels.Python(version, "/include", soabi) for version, soabi in (("3.11", "a"), ("3.12", "b"))]
    torches = [wheels.Torch(minor, Path("/torch")) for minor in ("2.13", "2.14")]
    lines = "\n".join(wheels.describe(pythons, torches, nvcc).lines)
    linked = re.findall(r"^build build/wheels/(\S+): link (.*)$", lines, re.MULTILINE)
    return {
        name: {
            str(Path(path).parent.relative_to("build/wheels"))
            for path in inputs.split()
            if path.endswith(".o")
        }
        for name, inputs in linked
    }


def test_only_the_bindings_are_compiled_for_each_python(wheels, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(wheels.native, "write", lambda path, text: None)
    linked = libraries_of(wheels, None)
    core = linked.pop("libgossamer_core.so")
    assert {folder.split("/")[0] for folder in core} == {"core"}
    assert linked == {
        f"{soabi}/_C_torch{minor.replace('.', '_')}.{soabi}.so": {f"torch{minor}", f"torch{minor}/{soabi}"}
        for soabi in ("a", "b")
        for minor in ("2.13", "2.14")
    }


def test_a_wheel_has_no_library_for_a_torch_that_is_not_made_for_its_python(wheels, monkeypatch) -> None:
    monkeypatch.setattr(wheels.native, "write", lambda path, text: None)
    monkeypatch.setattr(wheels, "UNMADE", {("3.11", "2.14")})
    linked = libraries_of(wheels, None)
    assert sorted(linked) == [
        "a/_C_torch2_13.a.so",
        "b/_C_torch2_13.b.so",
        "b/_C_torch2_14.b.so",
        "libgossamer_core.so",
    ]


def test_cuda_kernels_are_one_library_without_torch_and_python(wheels, monkeypatch) -> None:
    monkeypatch.setattr(wheels.native, "write", lambda path, text: None)
    monkeypatch.setattr(wheels.native, "architecture_flags", lambda nvcc: [])
    monkeypatch.setattr(wheels.native, "toolkit_root", lambda nvcc: "/cuda")
    linked = libraries_of(wheels, "nvcc")
    assert linked["libgossamer_cuda13.so"] == {
        f"core/{folder}" for folder in ("codec", "flat", "kernels", "optim", "sparse")
    }


def test_readme_of_the_package_index_has_no_relative_link(wheels) -> None:
    links = re.compile(r"\]\((?!https?://)([^)]+)\)")
    own, shown = (ROOT / "README.md").read_text(), wheels.native.readme()
    assert len(links.findall(own)) > 20
    assert links.findall(shown) == []
    assert "[" not in re.sub(r"```.*?```|`[^`]*`", "", shown, flags=re.DOTALL)
    assert "From a checkout of this repository" in shown


def test_changelog_has_the_version() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == gossamer.__version__
