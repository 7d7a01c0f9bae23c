"""Builds gossamer._C against the installed torch. Metadata lives in pyproject.toml.

Torch-free folders are compiled without torch's include directories, so a stray torch header fails the build. The files
of an instruction set have their own flags. Each such group is one incremental ninja run. The other files read torch's
headers from one precompiled header. GOSSAMER_BUILD_CUDA=auto|0|1 chooses CUDA: auto builds it when torch has CUDA and
nvcc is found.
"""

import glob
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent.resolve()
TORCH_FREE_FOLDERS = ("adasum", "base", "codec", "flat", "negotiate", "observe", "optim", "shm")
TORCH_FOLDERS = ("backend", "comm", "collectives", "route", "engine", "hook", "named", "python")
PRECOMPILED = "csrc/precompiled.h"
CXX_FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden"]
NVCC_FLAGS = ["-O3", "--fmad=false", "-Xcompiler=-Wall,-Wextra,-fvisibility=hidden,-ffp-contract=off"]
INSTRUCTION_SETS = {  # the name of such a file, in any folder: its own flags
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
    """Returns nvcc's architecture flags. torch adds its own only if no flag, paths included, contains "arch"."""
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
if WITH_CUDA:  # torch.utils.cpp_extension reads both
    os.environ["CUDA_HOME"] = toolkit_root(NVCC)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures(NVCC))

from torch.utils.cpp_extension import (  # noqa: E402  (CUDA_HOME is read at import)
    BuildExtension,
    CppExtension,
    CUDAExtension,
    include_paths,
    is_ninja_available,
)

if not is_ninja_available():
    raise SystemExit("setup.py: ninja was not found; run `pip install ninja`, then build again.")


def sources() -> list[str]:
    patterns = ["csrc/*", *(f"csrc/{folder}/**/*" for folder in TORCH_FREE_FOLDERS + TORCH_FOLDERS)]
    suffixes = (".cpp", ".cu") if WITH_CUDA else (".cpp",)
    found = [path for pattern in patterns for path in glob.glob(pattern, root_dir=ROOT, recursive=True)]
    x86_64 = platform.machine().lower() in ("x86_64", "amd64")
    return sorted(
        path
        for path in found
        if path.endswith(suffixes) and (x86_64 or Path(path).name not in INSTRUCTION_SETS)
    )


def headers() -> list[str]:
    found = (ROOT / "csrc").rglob("*")
    return sorted(
        str(path.relative_to(ROOT)) for path in found if path.suffix in (".h", ".inl", ".cuh", ".cu")
    )


def group_of(path: str) -> str:
    """Returns the name of a file's compile group: "torch", "core" or an instruction-set file's stem."""
    if Path(path).name in INSTRUCTION_SETS:
        return Path(path).stem
    return "core" if Path(path).parts[1] in TORCH_FREE_FOLDERS else "torch"


class BuildGossamer(BuildExtension):
    """BuildExtension with compile groups and a build folder that outlives pip's temporary ones."""

    def finalize_options(self) -> None:
        super().finalize_options()
        kind = f"cuda{torch.version.cuda}" if WITH_CUDA else "cpu"
        python = sysconfig.get_config_var("SOABI") or sysconfig.get_python_version()
        self.build_temp = str(ROOT / "build" / f"{python}-torch{torch.__version__}-{kind}")

    def build_extension(self, ext) -> None:
        groups: dict[str, list[str]] = {}
        for path in ext.sources:
            groups.setdefault(group_of(path), []).append(path)
        objects = []
        for name, paths in groups.items():
            if name == "torch":
                continue
            # Each group has its own folder: ninja writes one build.ninja per folder.
            objects += self.compiler.compile(
                paths,
                output_dir=str(Path(self.build_temp) / name),
                macros=ext.define_macros,
                include_dirs=[str(ROOT / "csrc")],
                extra_postargs={
                    "cxx": [*CXX_FLAGS, *INSTRUCTION_SETS.get(f"{name}.cpp", [])],
                    "nvcc": [*NVCC_FLAGS, *(architecture_flags() if WITH_CUDA else [])],
                },
            )
        ext.sources = groups["torch"]
        ext.extra_objects = objects
        ext.extra_compile_args["cxx"] += self.precompile(ext)
        super().build_extension(ext)

    def precompile(self, ext) -> list[str]:
        """Compiles PRECOMPILED with the torch group's flags. Returns the flags that make a file use it."""
        self.compiler.src_extensions.append(".h")
        (compiled,) = self.compiler.compile(
            [PRECOMPILED],
            output_dir=str(Path(self.build_temp) / "precompiled"),
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
        )
        header = Path(self.build_temp) / "precompiled" / Path(PRECOMPILED).name
        linked = header.with_name(f"{header.name}.gch")  # the name under which -include finds it
        linked.unlink(missing_ok=True)
        linked.symlink_to(compiled)
        return ["-Winvalid-pch", f"-include{header}"]


def extension():
    # Torch's headers are named again as system directories, so that they raise no warnings.
    system = include_paths("cuda" if WITH_CUDA else "cpu")
    # -fopenmp is for at::parallel_for. The linker does not get it: the threads are those of torch's OpenMP library.
    cxx = [*CXX_FLAGS, "-fopenmp", *(f"-isystem{path}" for path in system)]
    arguments = {
        "name": "gossamer._C",
        "sources": sources(),
        "depends": headers(),  # the source distribution holds them
        "include_dirs": [str(ROOT / "csrc")],
        "define_macros": [("GOSSAMER_WITH_CUDA", None)] if WITH_CUDA else [],
    }
    if not WITH_CUDA:
        return CppExtension(extra_compile_args={"cxx": cxx}, **arguments)
    nvcc = [*NVCC_FLAGS, *(f"-isystem={path}" for path in system), *architecture_flags()]
    return CUDAExtension(extra_compile_args={"cxx": cxx, "nvcc": nvcc}, **arguments)


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildGossamer})
