"""The connections of one model: from what with_bagua() is given as group to communicators."""

from typing import Any

import torch

from gossamer.bagua.torch_api.process_group import BaguaProcessGroup, CommMember
from gossamer.comm import Communicator, Flat, Hierarchical, hierarchy, is_communicator, private
from gossamer.errors import ConfigError


class BaguaConnections:
    """Of one model.

    Args:
        group: a group of Bagua or torch, a communicator, Hierarchical(one of these), or None for all workers.
        device: the model's.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        hosts = group if isinstance(group, Hierarchical) else None
        group = group.group if isinstance(group, Flat) else group
        self.device = device
        self.hosts = hosts.hosts if hosts else None
        self.always_by_hosts = hosts is not None
        self.comm, self.control = private_connections(hosts.group if hosts else group, device)

    def by_hosts(self, comm: Communicator) -> Any:
        """`comm` as hosts and the hop between them. Collective."""
        return hierarchy(comm, self.hosts)


def private_connections(group: Any, device: torch.device) -> tuple[Communicator, Communicator]:
    """New connections among a group's ranks, for tensors on `device` and for CPU tensors; a communicator as it is.

    Collective. ConfigError if this rank is not in the group.
    """
    group = torch_group_of("with_bagua", group)
    if is_communicator(group):
        return group, group
    return private(group, device)


def torch_group_of(what: str, group: Any) -> Any:
    """Of a Bagua group; anything else as it is. ConfigError if this rank is not in the group."""
    if not isinstance(group, BaguaProcessGroup):
        return group
    if group.get_global_communicator() is CommMember.NON_COMM_MEMBER:
        raise ConfigError(f"{what}: this rank is not in the group of ranks {group.ranks}")
    return group.torch_group
