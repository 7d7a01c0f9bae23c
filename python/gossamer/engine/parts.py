"""What the parts of one engine share: buckets.py, graph.py, join.py and reporting.py. None of them holds the engine."""

from dataclasses import dataclass

from torch import nn

from gossamer.comm import Communicator
from gossamer.engine.admission import Members
from gossamer.engine.algorithm import Algorithm


@dataclass(frozen=True)
class Parts:
    """The model, the algorithm and the group of one engine.

    Args:
        named: the parameters that the ranks share, by name.
        comm, control: the group, for tensors on the model's device and for CPU tensors.
    """

    algorithm: Algorithm
    members: Members
    named: dict[str, nn.Parameter]
    comm: Communicator
    control: Communicator
