"""Loads gossamer._C, the extension, for the torch that is installed. The first import of the package.

A build from source leaves one ``_C*.so`` in the package, for the torch that it was built with. A wheel holds one
library for each minor version of torch in this folder: ``_C_torch2_13.<tag of Python>.so`` runs with every 2.13.x. All
of them use ``libgossamer_core.so``, and so do the CUDA kernels, which the wheel gossamer-cuda13 brings in one library.
"""

import ctypes
import importlib.util
import os
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path

try:
    os.getcwd()
except FileNotFoundError as error:  # MKL, which torch loads, would abort the process with other words
    raise ImportError(
        "gossamer: the working directory must exist, got one that was deleted; change to another folder"
    ) from error

import torch  # loads the libraries that the extension links against

from gossamer.errors import ConfigError

FOLDER = Path(__file__).parent
FROM_SOURCE = "pip install 'setuptools>=77' ninja && pip install --no-build-isolation ."
CUDA = "13"  # the major version of CUDA that the wheel of kernels is for


def libraries(folder: Path, suffix: str) -> dict[tuple[int, int], Path]:
    """Returns a folder's libraries by torch's major and minor version.

    Args:
        suffix: the end of the names, such as ``.cpython-311-x86_64-linux-gnu.so``.
    """
    found = {}
    for path in folder.glob(f"_C_torch*{suffix}"):
        match = re.fullmatch(r"_C_torch(\d+)_(\d+)", path.name.removesuffix(suffix))
        if match:
            found[int(match[1]), int(match[2])] = path
    return found


def choose(folder: Path, suffix: str, torch_version: str) -> Path:
    """Returns the library for a version of torch.

    Args:
        torch_version: ``torch.__version__``. The patch version and what follows "+" do not matter.

    Raises ImportError for a minor version that the folder has no library for.
    """
    known = libraries(folder, suffix)
    version = re.match(r"(\d+)\.(\d+)", torch_version)
    if version and (path := known.get((int(version[1]), int(version[2])))):
        return path
    have = ", ".join(f"{major}.{minor}" for major, minor in sorted(known))
    raise ImportError(
        f"gossamer: torch must be a version that this package has a library for ({have or 'it has none'}), got torch "
        f"{torch_version}; install such a torch, or build from source, in a checkout: {FROM_SOURCE}"
    )


def cuda_kernels(torch_cuda: str | None) -> Path | None:
    """Returns the library of CUDA kernels, or None if its wheel is not installed or torch has no CUDA.

    Args:
        torch_cuda: ``torch.version.cuda``; None for a torch without CUDA.

    Raises:
        ConfigError: The wheel is of another version than this package, or for another CUDA than torch.
    """
    package = f"gossamer_cuda{CUDA}"
    if torch_cuda is None or importlib.util.find_spec(package) is None:
        return None
    kernels = importlib.import_module(package)
    wheel, version = f"gossamer-cuda{CUDA}", sys.modules["gossamer"].__version__
    if kernels.__version__ != version:
        raise ConfigError(
            f"gossamer: {wheel} must have gossamer's version, {version}, got {kernels.__version__}; install both from "
            f"one release, or uninstall {wheel} to use CPU tensors only"
        )
    if torch_cuda.split(".")[0] != CUDA:
        raise ConfigError(
            f"gossamer: {wheel} needs a torch for CUDA {CUDA}, got torch {torch.__version__} for CUDA {torch_cuda}; "
            f"install such a torch, or uninstall {wheel} and build from source, in a checkout: {FROM_SOURCE}"
        )
    return Path(str(kernels.__file__)).parent / f"libgossamer_cuda{CUDA}.so"


def load() -> None:
    """Makes ``gossamer._C`` importable, if no build from source has left it in the package."""
    name = "gossamer._C"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    path = choose(FOLDER, EXTENSION_SUFFIXES[0], torch.__version__)
    if kernels := cuda_kernels(torch.version.cuda):
        # The kernels register in the core, where the extension finds them.
        ctypes.CDLL(str(FOLDER / "libgossamer_core.so"))
        ctypes.CDLL(str(kernels))
    spec = importlib.util.spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    setattr(sys.modules["gossamer"], "_C", module)  # noqa: B010  (as the import system does for a submodule)


load()
