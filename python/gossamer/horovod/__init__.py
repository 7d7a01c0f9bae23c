# The package that stands in for `horovod`: `gossamer run --as-horovod` puts it under that name. Translation of names
# and arguments; what communicates is in gossamer.comm and the native core. Nothing heavy is imported here.
"""Horovod's names over Gossamer, module for module: ``import gossamer.horovod.torch as hvd``."""

from typing import Any

__all__ = ["run"]
__version__ = "0.28.1"  # of Horovod, whose names these are


def __getattr__(name: str) -> Any:
    if name == "run":  # the launcher is of no use to a worker
        from gossamer.horovod.runner import run

        return run
    raise AttributeError(f"module 'gossamer.horovod' has no attribute {name!r}")
