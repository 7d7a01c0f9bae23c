# setup.py on a tiny project with the repository's layout: what it says without torch, the flags each file
# gets, and that an editable install recompiles only what changed. Nothing is installed into this Python.

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import quick_python

FILES = {
    "README.md": "",
    "python/gossamer/__init__.py": '__version__ = "0.1.0"\n',
    "csrc/codec/parts.h": "#pragma once\nint plain();\nint two();\nint avx2();\nint avx512();\n",
    "csrc/codec/cpu_scalar.cpp": """
        #include "codec/parts.h"
        #if defined(__AVX2__) || defined(__AVX512F__)
        #error "instruction-set flags leaked into a plain file"
        #endif
        #ifdef PRECOMPILED
        #error "torch's precompiled headers leaked into a Torch-free file"
        #endif
        #if __has_include(<torch/torch.h>) || __has_include(<c10/core/Device.h>)
        #error "torch's headers are visible to a Torch-free file"
        #endif
        int plain() { return 1; }
    """,
    "csrc/codec/cpu_avx2.cpp": """
        #include "codec/parts.h"
        #ifdef __AVX512F__
        #error "too many flags"
        #endif
        int avx2() { return 2 * __AVX2__ * __F16C__; }
    """,
    "csrc/codec/cpu_avx512.cpp": """
        #include "codec/parts.h"
        int avx512() { return 4 * __AVX512F__ * __AVX512BW__ * __AVX512DQ__ * __AVX512VL__; }
    """,
    "csrc/precompiled.h": "#include <c10/core/Device.h>\n#define PRECOMPILED 1\n",
    "csrc/python/module.cpp": """
        #ifndef PRECOMPILED
        #error "a file with torch headers does not get the precompiled ones"
        #endif
        #include <c10/core/Device.h>
        #include <pybind11/pybind11.h>
        #include "codec/parts.h"
        PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.attr("sum") = plain() + avx2() + avx512(); }
    """,
}


@pytest.fixture
def project(tmp_path) -> Path:
    root = tmp_path / "project"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    return root


def run(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None, fresh: bool = False) -> str:
    """Runs Python, and returns what it prints. ``fresh``: one that has not imported the real gossamer."""
    command = [sys.executable if fresh else quick_python.program(), *map(str, argv)]
    result = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "GOSSAMER_BUILD_CUDA": "0", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout[-4000:]}"
    return result.stdout


def pip_install(project: Path, *options: str) -> tuple[set[str], dict[str, str]]:
    """Compiled files, and the environment in which the result is imported."""
    prefix = project.parent / "prefix"
    output = run(
        *["-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "--ignore-installed"],
        *["--no-warn-script-location", "--prefix", prefix, *options, "."],
        cwd=project,
    )
    (packages,) = prefix.glob("lib*/python*/site-packages")
    links = [path.read_text().strip() for path in packages.glob("*.pth")]  # of an editable install
    return compiled_in(output), {"PYTHONPATH": os.pathsep.join([*links, str(packages)])}


def compiled_in(output: str) -> set[str]:
    """Returns the files that ninja's lines, "[3/4] csrc/codec/cpu_avx2.cpp", name."""
    names = {name for line in re.findall(r"\[\d+/\d+\] (.*)", output) for name in line.split()}
    return names & {name for name in FILES if name.endswith(".cpp")}


def imported(project: Path, env: dict[str, str]) -> list[str]:
    code = "import torch, gossamer._C as native; print(native.sum, native.__file__)"
    return run("-c", code, cwd=project.parent, env=env, fresh=True).split()[-2:]


def test_without_torch_setup_says_what_to_install(project) -> None:
    (project / "torch.py").write_text("raise ImportError('no torch, says the test')\n")
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    for words in ("no torch, says the test", "pip install 'torch>=2.11'", "--no-build-isolation"):
        assert words in result.stderr
    assert "Traceback" not in result.stderr.split("setup.py: Gossamer")[1]


@pytest.mark.parametrize(
    ("choice", "message"), [("yes", "must be auto, 0 or 1"), ("1", "needs a torch with CUDA")]
)
def test_impossible_cuda_choice_is_refused(project, choice, message) -> None:
    code = "import runpy, torch; torch.version.cuda = None; runpy.run_path('setup.py', run_name='__main__')"
    result = subprocess.run(
        [quick_python.program(), "-c", code, "--version"],
        cwd=project,
        env={**os.environ, "GOSSAMER_BUILD_CUDA": choice},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert message in result.stderr


NVCC = """#!/bin/sh
case "$1" in
  --list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_86\\ncompute_89\\ncompute_90\\n%s' "$NEWER" ;;
  --dryrun) echo "#$ TOP=$TOOLKIT" >&2 ;;
esac
"""
CHOICES = """
import os, runpy, subprocess, torch
torch.version.cuda, torch.cuda._is_compiled = "13.0", lambda: True  # as in a torch with CUDA, without a GPU
torch.cuda.is_available = lambda: False
for choice, newer in (("auto", ""), ("auto", "compute_100\\ncompute_120\\n"), ("0", "")):
    os.environ |= {"GOSSAMER_BUILD_CUDA": choice, "NEWER": newer}
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    names = runpy.run_path("setup.py")
    graph, file, _ = names["describe"]()
    names["write"](names["ROOT"] / file, "\\n".join([*graph.lines, ""]))
    command = [names["find_ninja"](), "-f", file, "-t", "commands"]
    commands = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    built = [line for line in commands if "kernels.cu -o" in line and "-std=c++17" in line]
    linked = sum("kernels.cu.o" in line and "-lcudart" in line for line in commands)
    code = sum(line.count("-gencode") for line in built)
    print(choice, os.environ.get("TORCH_CUDA_ARCH_LIST"), len(built), code, linked)
"""


def test_a_torch_with_cuda_gets_code_for_all_cards_that_nvcc_knows_or_a_cpu_only_build(project) -> None:
    (project / "csrc" / "codec" / "kernels.cu").write_text("")
    nvcc = project / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    environment = {"PATH": f"{nvcc.parent}:{os.environ['PATH']}", "TOOLKIT": str(project)}
    output = run("-c", CHOICES, cwd=project, env=environment).splitlines()
    assert [line for line in output if line.startswith(("0 ", "auto "))] == [
        "auto 7.5;8.0;8.6;8.9;9.0+PTX 1 6 1",
        "auto 7.5;8.0;8.6;8.9;9.0+PTX;10.0;12.0+PTX 1 9 1",
        "0 None 0 0 0",
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)  # compiles; a second core may be busy
def test_a_plain_install_copies_the_package_and_an_editable_one_recompiles_only_what_changed(project) -> None:
    everything = {name for name in FILES if name.endswith(".cpp")}
    compiled, env = pip_install(project)
    assert compiled == everything
    total, file = imported(project, env)
    assert total == "7"
    assert Path(file).is_relative_to(project.parent / "prefix")
    (script,) = (project.parent / "prefix").glob("bin/gossamer")
    assert "gossamer.launch.cli" in script.read_text()

    source = project / "csrc" / "codec" / "cpu_scalar.cpp"
    source.write_text(source.read_text().replace("return 1", "return 11"))
    compiled, env = pip_install(project, "-e")
    assert compiled == {"csrc/codec/cpu_scalar.cpp"}
    total, file = imported(project, env)
    assert total == "17"
    assert Path(file).parent == project / "python" / "gossamer"

    (project / "csrc" / "codec" / "parts.h").touch()
    again = run("setup.py", "build_ext", "--inplace", cwd=project)
    assert compiled_in(again) == everything
    assert compiled_in(run("setup.py", "build_ext", "--inplace", cwd=project)) == set()


def test_a_precompiled_header_and_the_bindings_have_one_level_of_optimisation() -> None:
    names = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")  # from GCC 13 on a header fits no other
    flags = names["torch_flags"](Path("torch")), names["python_flags"](Path("torch"), "include")
    assert len({[flag for flag in each if flag.startswith("-O")][-1] for each in flags}) == 1


def test_readme_of_the_metadata_has_texts_for_relative_links(project) -> None:
    (project / "README.md").write_text(
        "![A plot.](plot.svg)\n\n[Here](docs/a.md), [there](https://example.org).\n"
    )
    output = run("setup.py", "--quiet", "dist_info", cwd=project)
    (metadata,) = project.glob("*.dist-info/METADATA")
    _, _, text = metadata.read_text().partition("\n\n")
    assert text.strip() == "A plot.\n\nHere, [there](https://example.org).", output


def test_version_stands_in_one_place() -> None:
    holders = [
        path
        for path in [*(ROOT / "python").rglob("*.py"), ROOT / "setup.py", ROOT / "pyproject.toml"]
        if "0.1.0" in path.read_text()
    ]
    assert holders == [ROOT / "python" / "gossamer" / "__init__.py"]
