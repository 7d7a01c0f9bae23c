"""Loads gossamer._C, the extension, for the torch that is installed. The first import of the package.

A build from source leaves one ``_C*.so`` in the package, for the torch that it was built with. A wheel holds one
library for each minor version of torch in this folder: ``_C_torch2_13.<tag of Python>.so`` runs with every 2.13.x. A
wheel of CUDA kernels adds libraries with ``_cuda13`` after the minor, for a torch with that major version of CUDA.
"""

import importlib.util
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path

import torch  # loads the libraries that the extension links against

FOLDER = Path(__file__).parent
FROM_SOURCE = "pip install 'setuptools>=77' ninja && pip install --no-build-isolation ."


def libraries(folder: Path, suffix: str) -> dict[tuple[int, int, str], Path]:
    """Returns a folder's libraries by torch's major and minor version and by what they add: "" or "cuda13".

    Args:
        suffix: the end of the names, such as ``.cpython-311-x86_64-linux-gnu.so``.
    """
    found = {}
    for path in folder.glob(f"_C_torch*{suffix}"):
        match = re.fullmatch(r"_C_torch(\d+)_(\d+)(?:_(cuda\d+))?", path.name.removesuffix(suffix))
        if match:
            found[int(match[1]), int(match[2]), match[3] or ""] = path
    return found


def choose(folder: Path, suffix: str, torch_version: str, cuda: str | None) -> Path:
    """Returns the library for a version of torch. It has CUDA kernels if torch has CUDA and a wheel has brought them.

    Args:
        torch_version: ``torch.__version__``. The patch version and what follows "+" do not matter.
        cuda: ``torch.version.cuda``; None for a torch without CUDA.

    Raises ImportError for a minor version that the folder has no library for.
    """
    known = libraries(folder, suffix)
    version = re.match(r"(\d+)\.(\d+)", torch_version)
    for kernels in ([f"cuda{cuda.split('.')[0]}"] if cuda else []) + [""]:
        if version and (path := known.get((int(version[1]), int(version[2]), kernels))):
            return path
    have = ", ".join(f"{major}.{minor}" for major, minor, kernels in sorted(known) if not kernels)
    raise ImportError(
        f"gossamer: torch must be a version that this package has a library for ({have or 'it has none'}), got torch "
        f"{torch_version}; install such a torch, or build from source, in a checkout: {FROM_SOURCE}"
    )


def load() -> None:
    """Makes ``gossamer._C`` importable, if no build from source has left it in the package."""
    name = "gossamer._C"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    path = choose(FOLDER, EXTENSION_SUFFIXES[0], torch.__version__, torch.version.cuda)
    spec = importlib.util.spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    setattr(sys.modules["gossamer"], "_C", module)  # noqa: B010  (as the import system does for a submodule)


load()
