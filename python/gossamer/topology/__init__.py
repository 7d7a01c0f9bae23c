"""Topologies: who averages with whom, with which weight, in which round of decentralized averaging.

A topology is arithmetic on rank numbers, without torch: nothing is sent here. Every rank computes its own part, and the
parts of all ranks fit together. The decentralized algorithms use topologies; docs/topologies.md compares them.
"""

from gossamer.errors import ConfigError
from gossamer.topology.base import Exchange, Mixing, Topology, consensus_steps, mixing_matrix
from gossamer.topology.base_graph import BaseGraph
from gossamer.topology.formulas import All, OnePeerExponential, RandomPairs, Ring, ShiftOne

__all__ = [
    "TOPOLOGIES",
    "All",
    "BaseGraph",
    "Exchange",
    "Mixing",
    "OnePeerExponential",
    "RandomPairs",
    "Ring",
    "ShiftOne",
    "Topology",
    "consensus_steps",
    "mixing_matrix",
    "resolve",
]

TOPOLOGIES: dict[str, type[Topology]] = {
    "all": All,
    "ring": Ring,
    "shift_one": ShiftOne,
    "one_peer_exponential": OnePeerExponential,
    "base_graph": BaseGraph,
    "random_pairs": RandomPairs,
}
"""The topologies by the names that `resolve` and the algorithms take."""


def resolve(topology: str | Topology) -> Topology:
    """Returns the topology of a name in TOPOLOGIES, with default settings. Returns a Topology as it is.

    Raises ConfigError for anything else.
    """
    if isinstance(topology, Topology):
        return topology
    if not isinstance(topology, str) or topology not in TOPOLOGIES:
        raise ConfigError(f"topology: must be a Topology or one of {', '.join(TOPOLOGIES)}, got {topology!r}")
    return TOPOLOGIES[topology]()
