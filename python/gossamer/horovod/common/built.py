# Which libraries this installation has and uses, under Horovod's names. Answers, no decisions.
"""Horovod's ``*_built`` and ``*_enabled`` queries."""

import importlib.util

import torch
import torch.distributed as dist

from gossamer import _C, config


def mpi_built() -> bool:
    """Whether mpi4py, through which workers of mpirun meet, is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether mpirun started this process, so that the workers meet over MPI. Tensors never travel over it."""
    return config.launched_by() == "mpirun" and mpi_built()


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from any thread. ValueError if MPI is not enabled."""
    if not mpi_enabled():
        raise ValueError(
            "hvd.mpi_threads_supported: MPI must be enabled; mpirun did not start this process, or mpi4py is missing"
        )
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def gloo_built() -> bool:
    """True: the backend "gossamer" uses Gloo between hosts, and HOROVOD_CPU_OPERATIONS=gloo uses it alone."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """True, under every launcher: see gloo_built()."""
    return gloo_built()


def nccl_built() -> int:
    """NCCL's version code (2.27.3 is 22703), or 0 where torch has no NCCL."""
    if not dist.is_nccl_available() or torch.version.cuda is None:
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """Whether this build has kernels for CUDA tensors."""
    return bool(_C.with_cuda)


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False
