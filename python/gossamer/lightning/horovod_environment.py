"""Lightning's view of who takes part, where hvd.init() knows it. Made a ClusterEnvironment by namespaces.subclass()."""

import gossamer.horovod.torch as hvd


class HorovodEnvironment:
    """A ClusterEnvironment, whose ranks are those of hvd.init()."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # hvd.init() has made the connections

    @staticmethod
    def detect() -> bool:
        """False: it comes with the strategy."""
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
        """Nothing."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing."""
