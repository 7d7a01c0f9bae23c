"""Bagua's two decentralized algorithms, as gossamer.Decentralized and gossamer.LowPrecisionDecentralized."""

from gossamer import algorithms
from gossamer.bagua.hooked.operations import require_peers
from gossamer.bagua.torch_api.algorithms.base import NativeAlgorithm
from gossamer.codec import MinMaxUInt8


class DecentralizedAlgorithm(NativeAlgorithm):
    """Averages weights with all ranks or with one, while forward and backward run.

    Args:
        hierarchical: no effect; every rank is a peer.
        peer_selection_mode: "all" or "shift_one".
        communication_interval: optimizer steps from one averaging to the next. The first step averages.
    """

    def __init__(
        self, hierarchical: bool = True, peer_selection_mode: str = "all", communication_interval: int = 1
    ) -> None:
        require_peers("DecentralizedAlgorithm", peer_selection_mode, "all", "shift_one")
        self.hierarchical: bool = hierarchical
        self.peer_selection_mode: str = peer_selection_mode
        self.communication_interval = communication_interval
        self.native()  # refuses a wrong interval here

    def native(self) -> algorithms.Algorithm:
        return algorithms.Decentralized(self.peer_selection_mode, self.communication_interval)


class LowPrecisionDecentralizedAlgorithm(NativeAlgorithm):
    """Sends compressed changes of weights to both neighbours on a ring. Two ranks average with halves.

    Args:
        hierarchical: no effect; every rank is on the ring.
        communication_interval: optimizer steps from one exchange to the next. The first step exchanges.
    """

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        self.hierarchical: bool = hierarchical
        self.communication_interval: int = communication_interval
        self.native()

    def native(self) -> algorithms.Algorithm:
        return algorithms.LowPrecisionDecentralized(
            MinMaxUInt8(), "ring", interval=self.communication_interval
        )
