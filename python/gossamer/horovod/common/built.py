"""Horovod's ``*_built`` and ``*_enabled`` queries: which libraries this installation has and uses."""

import importlib.util

import torch
import torch.distributed as dist

from gossamer import _C, config

__all__ = ["ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built"]
__all__ += ["gloo_enabled", "mpi_enabled", "mpi_threads_supported"]


def mpi_built() -> bool:
    """Returns whether mpi4py is installed. Workers of mpirun meet through it."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Returns whether mpirun started this process, so that the workers meet over MPI. Tensors never travel over MPI."""
    return config.launched_by() == "mpirun" and mpi_built()


def mpi_threads_supported() -> bool:
    """Returns whether MPI may be called from any thread. Raises ValueError if MPI is not enabled."""
    if not mpi_enabled():
        raise ValueError(
            "hvd.mpi_threads_supported: MPI must be enabled; mpirun did not start this process, or mpi4py is missing"
        )
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def gloo_built() -> bool:
    """Returns whether torch has Gloo, which the backend "gossamer" uses between hosts."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Returns gloo_built(), under every launcher."""
    return gloo_built()


def nccl_built() -> int:
    """Returns NCCL's version code, such as 22703 for 2.27.3, or 0 where torch has no NCCL."""
    if not dist.is_nccl_available() or torch.version.cuda is None:
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """Returns whether this build has kernels for CUDA tensors."""
    return bool(_C.with_cuda)


def rocm_built() -> bool:
    """Returns whether torch was built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Returns False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Returns False: Intel's oneCCL is not used."""
    return False
