"""Communicators move bytes between the ranks of a group, and do nothing else.

``c10d`` makes them of torch's process groups, ``hierarchical`` of hosts, ``symmetric`` and ``host_memory`` of memory
that ranks share. ``named`` opens operations that are matched by name. The native classes are in csrc/comm and
csrc/named.
"""

from gossamer._C import Communicator
from gossamer._C import Pending as Work
from gossamer.comm.backend import register as register_backend
from gossamer.comm.c10d import (
    connect_pair,
    from_backend,
    from_group,
    gather_numbers,
    private,
    private_among,
    split,
    store_of,
    timeout_of,
)
from gossamer.comm.hierarchical import (
    KINDS,
    Flat,
    GroupLike,
    Hierarchical,
    connect_by_hosts,
    direct_group,
    duplicate,
    given_group,
    goes_by_hosts,
    hierarchy,
    is_communicator,
    is_default,
    layout_text,
    way_of,
)
from gossamer.comm.host_memory import HostMemory, host_memory, why_through_host
from gossamer.comm.named import NamedOptions, open_named, sums_by_hosts
from gossamer.comm.symmetric import MAX_RANKS, Symmetric, symmetric

__all__ = ["Communicator", "Work", "from_backend", "from_group", "gather_numbers", "private", "private_among"]
__all__ += ["KINDS", "Flat", "GroupLike", "Hierarchical", "connect_by_hosts", "direct_group", "duplicate"]
__all__ += ["given_group", "goes_by_hosts", "hierarchy", "is_communicator", "is_default", "layout_text"]
__all__ += ["way_of"]
__all__ += ["MAX_RANKS", "HostMemory", "Symmetric", "host_memory", "symmetric", "why_through_host"]
__all__ += ["NamedOptions", "open_named", "sums_by_hosts"]
__all__ += ["connect_pair", "register_backend", "split", "store_of", "timeout_of"]
