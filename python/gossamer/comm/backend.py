"""The c10d backend "gossamer" under torch.distributed's own names.

After ``import gossamer``, ``init_process_group("gossamer")``, ``"cpu:gossamer,cuda:nccl"`` and
``new_group(backend="gossamer")`` work as with "gloo": CPU tensors go through shared memory between the ranks
of a host, and through Gloo between hosts. The backend itself is native (csrc/backend). torch 2.15 finds it without the
import, by the entry point "torch.distributed.backends" in pyproject.toml.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossamer import _C

NAME = "gossamer"


def register() -> None:
    """Registers the backend with torch.distributed, when gossamer is imported or torch looks for it. Idempotent."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _backend_options: Any) -> Any:
    timeout = timedelta(seconds=options.timeout.total_seconds())
    return _C.GossamerBackend(options.store, options.group_rank, options.group_size, timeout)
