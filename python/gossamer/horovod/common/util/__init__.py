# Horovod's helpers that scripts import from here: what is installed, and an environment for a while. Answers come from
# built.py. Helpers for building Horovod and for its other frameworks are not here.
"""Of ``horovod.common.util``: what is built, ``env`` and a few tests of values."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from gossamer.horovod.common import built

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

_Answer = TypeVar("_Answer")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the part for a framework is here: True for "torch" alone. ``verbose`` prints the answer."""
    return _told(ext_base_name == "torch", f"Extension {ext_base_name}", "built", verbose)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError for a framework other than "horovod.torch". The other arguments are Horovod's, and not needed."""
    if ext_name != "horovod.torch":
        raise ImportError(f"{ext_name} is not there: gossamer.horovod is for PyTorch; import horovod.torch")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework sees a GPU: PyTorch's answer for "torch", False for others."""
    found = ext_base_name == "torch" and torch.cuda.is_available()
    return _told(found, f"Extension {ext_base_name}", "running with GPU", verbose)


def mpi_built(verbose: bool = False) -> bool:
    """As ``hvd.mpi_built()``, which prints nothing."""
    return _told(built.mpi_built(), "Extension torch", "built with MPI", verbose)


def gloo_built(verbose: bool = False) -> bool:
    """As ``hvd.gloo_built()``, which prints nothing."""
    return _told(built.gloo_built(), "Extension torch", "built with Gloo", verbose)


def nccl_built(verbose: bool = False) -> int:
    """As ``hvd.nccl_built()``, which prints nothing."""
    return _told(built.nccl_built(), "Extension torch", "built with NCCL", verbose)


def ddl_built(verbose: bool = False) -> bool:
    """As ``hvd.ddl_built()``, which prints nothing."""
    return _told(built.ddl_built(), "Extension torch", "built with DDL", verbose)


def ccl_built(verbose: bool = False) -> bool:
    """As ``hvd.ccl_built()``, which prints nothing."""
    return _told(built.ccl_built(), "Extension torch", "built with CCL", verbose)


def _told(answer: _Answer, subject: str, what: str, verbose: bool) -> _Answer:
    if verbose:
        print(f"{subject} {'was' if answer else 'was NOT'} {what}.")
    return answer


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Within it these environment variables are set, but those given None; afterwards they are what they were."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two. Adasum needs none here."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741  (Horovod's name)
    """The list in n parts in a row, whose lengths differ by 1 at most; the longer ones first."""
    length, longer = divmod(len(l), n)
    ends = [length * part + min(part, longer) for part in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    """Whether iter() takes it."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
