"""Bagua's process groups and communicators: names for torch.distributed's groups. No transport is here.

A group knows three communicators: all its ranks, those on this host, and the first rank of each host.
communication.py re-exports what Bagua's module of that name had.
"""

import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from gossamer import runtime
from gossamer.bagua.torch_api import env
from gossamer.comm import timeout_of
from gossamer.errors import CommError, ConfigError


class CommMember:
    """Marks in the place of a communicator: WORLD, all ranks; NON_COMM_MEMBER, one that this rank is not in."""

    WORLD = object()
    NON_COMM_MEMBER = object()


class BaguaCommunicator:
    """One group of ranks. Its ranks count from 0."""

    def __init__(self, group: dist.ProcessGroup, stream: "torch.cuda.Stream | None" = None) -> None:
        self.group: dist.ProcessGroup = group
        self.stream: torch.cuda.Stream | None = stream
        self._aborted = False

    def rank(self) -> int:
        """This rank's number in this communicator."""
        return dist.get_rank(self.group)

    def nranks(self) -> int:
        """Number of ranks in this communicator."""
        return dist.get_world_size(self.group)

    def device_id(self) -> int:
        """Index of this rank's GPU; -1 on a machine without."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    def barrier(self) -> None:
        """Returns when all ranks of the communicator have called it. CommError after abort()."""
        self.require_usable("barrier")
        dist.barrier(self.group)

    def abort(self) -> None:
        """Ends this rank's part. Any thread may call it.

        Later calls raise CommError, on this rank and on ranks that wait for it. A call in another thread ends with an
        error; with Gloo it ends only after its timeout.
        """
        self._aborted = True
        self.group.abort()

    def check_abort(self) -> bool:
        """True once abort() was called on this rank."""
        return self._aborted

    def require_usable(self, what: str) -> None:
        """CommError if this communicator was aborted."""
        if self._aborted:
            raise CommError(
                f"{what}: this communicator was aborted on rank {self.rank()}/{self.nranks()}; make a new group."
            )


class BaguaProcessGroup:
    """Some of the workers. A rank that is not in it holds such an object too; its communicators are marks."""

    def __init__(self, ranks: list[int], stream: Any, every: Any, by_hosts: "tuple[Any, Any] | int") -> None:
        """Holds existing groups, which are torch groups, or None for a group without this rank.

        Args:
            ranks: global ranks, in the group's order.
            by_hosts: the group of this host, and that of each host's first rank; _ALONE for a group of this rank, which
                is made at its first use. A number of hosts: there are no such groups.
        """
        self.ranks: list[int] = ranks
        self.stream = stream
        self.torch_group = every
        self.by_hosts: tuple[Any, Any] | int = by_hosts
        self._communicators: dict[Any, BaguaCommunicator] = {}

    def get_global_communicator(self) -> Any:
        """The communicator of all ranks of the group, or CommMember.NON_COMM_MEMBER."""
        return self._communicator(self.torch_group)

    def get_intra_node_communicator(self) -> Any:
        """The communicator of the group's ranks on this host, or CommMember.NON_COMM_MEMBER.

        This and the next raise ConfigError if from_torch_group() made the group and its ranks are on several hosts.
        """
        return self._communicator(self._pair()[0])

    def get_inter_node_communicator(self) -> Any:
        """The communicator of each host's first rank of the group; CommMember.NON_COMM_MEMBER on other ranks."""
        intra_node, inter_node = self._pair()
        if inter_node is _ALONE:  # made late, because torch numbers some groups of a process
            inter_node = dist.new_group([runtime.rank()], use_local_synchronization=True)
            self.by_hosts = intra_node, inter_node
        return self._communicator(inter_node)

    def _communicator(self, group: Any) -> Any:
        if _foreign(group):
            return CommMember.NON_COMM_MEMBER
        return self._communicators.setdefault(group, BaguaCommunicator(group, self.stream))

    def _pair(self) -> tuple[Any, Any]:
        if isinstance(self.by_hosts, int):
            raise ConfigError(
                f"from_torch_group: ranks {self.ranks} are on {self.by_hosts} hosts, and connections for the ranks of "
                f"one need every worker; make the group by new_group({self.ranks})."
            )
        return self.by_hosts


_ALONE = object()
_default: BaguaProcessGroup | None = None
_nodes: list[str] = []  # the host of each worker, by rank


def init_process_group(
    store: "dist.Store | None" = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """Joins all workers. Each calls it once, with or without GPUs.

    Without a store, rank and size come from the launcher, and the backend is that of gossamer.init(). A group that
    torch.distributed or gossamer.init() made before is adopted. With a store, the three numbers are needed too:
    `local_world_size` workers are on each host, and their ranks follow each other. The environment is not written.

    Raises:
        ConfigError: called twice; numbers without a store or a store without; otherwise as gossamer.init().
        CommError: the other workers were not reached in time.
    """
    global _default, _nodes
    if is_initialized():
        raise ConfigError(
            f"init_process_group: must be called once, but this process is already rank {runtime.rank()} of "
            f"{runtime.size()}; ask is_initialized(), or call gossamer.shutdown() first."
        )
    numbers = {"rank": rank, "world_size": world_size, "local_world_size": local_world_size}
    if store is not None:
        if min(numbers.values()) < 0:
            raise ConfigError(
                f"init_process_group: a store needs rank, world_size and local_world_size, got {numbers}."
            )
        runtime.join(store, rank=rank, size=world_size, local_size=local_world_size)
    elif any(number != -1 for number in numbers.values()):
        raise ConfigError(f"init_process_group: rank and sizes are for a store, got {numbers} without one.")
    elif not runtime.is_initialized():
        runtime.init()
    _nodes = [""] * runtime.size()
    dist.all_gather_object(_nodes, f"{socket.gethostname()}/{env.get_node_rank()}")
    _default = _over(dist.group.WORLD, list(range(runtime.size())), None)


def is_initialized() -> bool:
    """True after init_process_group(), until gossamer.shutdown() or torch's destroy_process_group()."""
    return _default is not None and dist.is_initialized() and _default.torch_group is dist.group.WORLD


def default_group() -> BaguaProcessGroup:
    """The group of all workers. ConfigError before init_process_group()."""
    if not is_initialized():
        raise ConfigError("bagua: needs the group of workers; call init_process_group() first.")
    assert _default is not None  # is_initialized() above
    return _default


def new_group(
    ranks: "Iterable[int] | None" = None, stream: "torch.cuda.Stream | None" = None
) -> BaguaProcessGroup:
    """Makes a group of some workers. All workers call it, in the same order of calls.

    Args:
        ranks: global ranks, in any order; None: all workers.
        stream: the stream of the group's operations on GPU tensors. It waits for the caller's stream before an
            operation, and the caller's stream waits for it afterwards. None: the caller's stream.

    Raises:
        ConfigError: before init_process_group(); no ranks; a rank that is there twice, or is no worker's.
    """
    default_group()
    chosen = sorted(range(runtime.size()) if ranks is None else ranks)
    if not chosen or len(set(chosen)) < len(chosen) or not 0 <= chosen[0] <= chosen[-1] < runtime.size():
        raise ConfigError(
            f"new_group: ranks must be distinct and from 0 to {runtime.size() - 1}, got {chosen}."
        )
    _check_stream("new_group", stream)
    return _over(_torch_group(chosen), chosen, stream)


def from_torch_group(group: Any, stream: "torch.cuda.Stream | None" = None) -> BaguaProcessGroup:
    """A group of the ranks of torch's `group`, over the same connections. Only these ranks need to call it.

    If the ranks are on several hosts and are not all workers, the group has only the global communicator. new_group()
    makes the other communicators too, because every worker calls it.

    Raises:
        ConfigError: before init_process_group(); no torch group.
    """
    world = default_group()
    _check_stream("from_torch_group", stream)
    if _foreign(group):
        return BaguaProcessGroup([], stream, None, (None, None))
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"from_torch_group: group must be a torch.distributed group, got {group!r}.")
    if group is world.torch_group:
        return BaguaProcessGroup(world.ranks, stream, group, world.by_hosts)
    ranks = dist.get_process_group_ranks(group)
    hosts = len(_by_host(ranks))
    return BaguaProcessGroup(ranks, stream, group, _on_one_host(group, ranks) if hosts == 1 else hosts)


def torch_group_of(what: str, group: Any) -> Any:
    """The torch group of a Bagua group; anything else as it is.

    Raises:
        ConfigError: this rank is not in the group. The text begins with `what`.
    """
    if not isinstance(group, BaguaProcessGroup):
        return group
    if group.get_global_communicator() is CommMember.NON_COMM_MEMBER:
        raise ConfigError(f"{what}: this rank is not in the group of ranks {group.ranks}")
    return group.torch_group


def _over(every: Any, ranks: list[int], stream: Any) -> BaguaProcessGroup:
    """A group with groups of each host and across hosts. All workers make all of them in one order, as torch needs."""
    hosts = _by_host(ranks)
    if len(hosts) == 1:
        return BaguaProcessGroup(ranks, stream, every, _on_one_host(every, ranks))
    groups = [_torch_group(members) for members in hosts]
    intra_node = next((group for group in groups if not _foreign(group)), None)
    return BaguaProcessGroup(
        ranks, stream, every, (intra_node, _torch_group([members[0] for members in hosts]))
    )


def _on_one_host(every: Any, ranks: list[int]) -> tuple[Any, Any]:
    return every, _ALONE if runtime.rank() == ranks[0] else None


def _torch_group(ranks: list[int]) -> Any:
    assert dist.group.WORLD is not None  # the callers have asked
    return dist.new_group(ranks, timeout=timeout_of(dist.group.WORLD))


def _by_host(ranks: list[int]) -> list[list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(_nodes[rank], []).append(rank)
    return list(hosts.values())


def _foreign(group: Any) -> bool:
    return group is None or group is dist.GroupMember.NON_GROUP_MEMBER


def _check_stream(what: str, stream: Any) -> None:
    if stream is not None and not isinstance(stream, torch.cuda.Stream):
        raise ConfigError(f"{what}: stream must be a torch.cuda.Stream or None, got {stream!r}.")
