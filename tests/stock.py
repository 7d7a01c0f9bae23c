"""torch's DistributedDataParallel beside ours in the same threads: `run_beside` makes a group for each. No test file"""

from datetime import timedelta

import torch
import torch.distributed as dist

from ranks import TIMEOUT_S, run_ranks


def run_beside(size, body, **options):
    """body(comm, group) on every rank: a communicator for ours, a torch process group of the same ranks for torch's."""
    store = dist.HashStore()

    def rank_body(comm):
        return body(comm, gloo_group(store, comm.rank, size))

    return run_ranks(size, rank_body, **options)


def gloo_group(store, rank, size):
    """A process group that torch's global list does not know, so that ranks can be threads."""
    store = dist.PrefixStore("stock", store)
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group
