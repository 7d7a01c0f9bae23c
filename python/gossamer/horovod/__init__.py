"""Horovod's names over Gossamer, module for module: ``import gossamer.horovod.torch as hvd``.

A call such as ``hvd.allreduce`` goes through these rooms in order: torch/mpi_ops.py (its name), torch/operations
(arguments, waiting, gradients), csrc/named/collectives (takes the tensors), csrc/negotiate (the ranks agree on what
runs next), csrc/named/batch_runner (fuses and scales), csrc/comm (moves the bytes: the wire). comm/named.py has opened
the connections of the process set. A ``DistributedOptimizer`` hands its gradients to torch/reduction; most then ride on
Gossamer's engine (csrc/engine). common/ has the session from ``init()`` to ``shutdown()``. This package imports lazily.
"""

from typing import Any

__all__ = ["run"]
__version__ = "0.28.1"  # the version of Horovod whose names these are


def __getattr__(name: str) -> Any:
    if name == "run":  # a worker does not need the launcher
        from gossamer.horovod.runner import run

        return run
    raise AttributeError(f"module 'gossamer.horovod' has no attribute {name!r}")
