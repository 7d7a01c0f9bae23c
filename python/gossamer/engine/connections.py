"""The connections of one model: they turn a user's process group into the communicators of an engine."""

from typing import Any, NamedTuple

import torch
from torch import nn

from gossamer.comm import Communicator, connect_by_hosts, given_group, is_communicator, private


class Connections(NamedTuple):
    """The arguments `comm` and `control` of Engine, and the group that the user gave."""

    comm: Communicator
    control: Communicator
    given: Any


def connect(module: nn.Module, group: Any) -> Connections:
    """Make new connections for a model. Collective over the group.

    Args:
        group: a process group, a communicator, None for the default group, or one of gossamer.comm.KINDS around them.
    """
    given: Any = given_group(group)
    comm, control = (given, given) if is_communicator(given) else private(given, device_of(module))
    return Connections(connect_by_hosts(group, comm, control, overlap=True), control, given)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a model's gradients; the CPU for a device that no communicator serves.

    The engine refuses such a model later, on all ranks together.
    """
    devices = (param.device for param in module.parameters() if param.requires_grad)
    return next((device for device in devices if device.type in ("cpu", "cuda")), torch.device("cpu"))
