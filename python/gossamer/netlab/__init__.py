# A network of several hosts on one machine, for measuring and testing over links of any rate: network namespaces
# around a bridge. Linux and root only. Start reading at hosts.py. It knows nothing of training;
# `gossamer bench network`, the benchmarks and the tests use it.
"""Several hosts on one machine, joined by links of a given rate."""

from gossamer.netlab.counters import Counters
from gossamer.netlab.hosts import DEVICE, Hosts, missing, no_containers
from gossamer.netlab.job import Output, run_on_hosts
from gossamer.netlab.shaping import Shape

__all__ = [
    "DEVICE",
    "Counters",
    "Hosts",
    "Output",
    "Shape",
    "missing",
    "no_containers",
    "run_on_hosts",
]
