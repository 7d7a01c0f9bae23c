"""Lightning's ClusterEnvironment where hvd.init() has set up the ranks, and the devices of a host."""

import torch

import gossamer.horovod.torch as hvd
from gossamer.errors import ConfigError


class HorovodEnvironment:
    """A ClusterEnvironment with the ranks of hvd.init(). namespaces.subclass() makes it a subclass."""

    creates_processes_externally = True
    main_address: str = ""  # hvd.init() has made the connections
    main_port: int = 0

    @staticmethod
    def detect() -> bool:
        """Return False: the strategy brings the environment."""
        return False

    def world_size(self) -> int:
        return hvd.size() if hvd.is_initialized() else 1

    def global_rank(self) -> int:
        return hvd.rank() if hvd.is_initialized() else 0

    def local_rank(self) -> int:
        return hvd.local_rank() if hvd.is_initialized() else 0

    def node_rank(self) -> int:
        return hvd.cross_rank() if hvd.is_initialized() else 0

    def set_world_size(self, size: int) -> None:
        """Do nothing."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing."""


def devices_of_host(devices: list[torch.device], num_nodes: int) -> list[torch.device]:
    """Return one device for each process of this host, in the order of local ranks. Call it after hvd.init().

    Args:
        devices: the Trainer's devices. One device stands for all processes. There may be more GPUs than processes.

    Raises:
        ConfigError: The launcher has started another number of processes or hosts.
    """
    here = hvd.local_size()
    if num_nodes not in (1, hvd.cross_size()):
        raise ConfigError(
            f"HorovodStrategy: num_nodes must be the number of hosts that the launcher has started, which is "
            f"{hvd.cross_size()}, got {num_nodes}; leave it out"
        )
    cuda = devices[0].type == "cuda"
    if len(devices) == 1:
        devices = [torch.device("cuda", index) if cuda else devices[0] for index in range(here)]
    if len(devices) != here and not (cuda and len(devices) > here):
        wanted = len(devices)
        fitting = "devices=1" if here == 1 else f"devices=1 or devices={here}"
        raise ConfigError(
            f"HorovodStrategy: each device needs a process of its own, which a launcher starts, got devices={wanted} "
            f"and {here} process{'es' if here > 1 else ''} on this host; start the script with "
            f"`gossamer run --nproc-per-node {wanted}`, or give {fitting}"
        )
    return devices[:here]
