"""The helpers of ``horovod.common.util`` that scripts import: what is built, ``env``, and a few small functions.

Helpers for building Horovod, and for its other frameworks, are not here.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

from gossamer.horovod.common import built

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

_Answer = TypeVar("_Answer")


class _Query(Protocol):
    def __call__(self, verbose: bool = False) -> int: ...


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether the part for a framework is here: True for "torch" alone. ``verbose`` prints the answer."""
    return _printed(ext_base_name == "torch", f"Extension {ext_base_name}", "built", verbose)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError for a framework other than "horovod.torch". The other arguments are Horovod's, and unused."""
    if ext_name != "horovod.torch":
        raise ImportError(f"{ext_name} is not there: gossamer.horovod is for PyTorch; import horovod.torch")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether a framework sees a GPU: PyTorch's answer for "torch", False for others."""
    found = ext_base_name == "torch" and torch.cuda.is_available()
    return _printed(found, f"Extension {ext_base_name}", "running with GPU", verbose)


def _query(name: str, what: str) -> _Query:
    query = getattr(built, name)

    def ask(verbose: bool = False) -> int:
        return _printed(query(), "Extension torch", f"built with {what}", verbose)

    ask.__name__ = ask.__qualname__ = name
    ask.__doc__ = f"Returns ``hvd.{name}()``. ``verbose`` prints the answer."
    return ask


mpi_built: _Query = _query("mpi_built", "MPI")
gloo_built: _Query = _query("gloo_built", "Gloo")
nccl_built: _Query = _query("nccl_built", "NCCL")
ddl_built: _Query = _query("ddl_built", "DDL")
ccl_built: _Query = _query("ccl_built", "CCL")


def _printed(answer: _Answer, subject: str, what: str, verbose: bool) -> _Answer:
    if verbose:
        print(f"{subject} {'was' if answer else 'was NOT'} {what}.")
    return answer


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets these environment variables within it, except those given None; afterwards all are what they were."""
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
    """Returns whether a number of ranks is a power of two. Gossamer's Adasum does not need that."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741  (Horovod's name)
    """Divides a list into n consecutive parts whose lengths differ by 1 at most, the longer ones first."""
    length, longer = divmod(len(l), n)
    ends = [length * part + min(part, longer) for part in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    """Returns whether iter() takes it."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
