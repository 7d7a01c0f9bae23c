"""The lab: several hosts on one machine, joined by links of a given rate. Linux and root only.

hosts.py makes hosts of network namespaces around a bridge; shaping.py says how slow a link is; counters.py reads what a
network device has sent; job.py runs a command on every host. They know nothing of training. comparison/ is
`gossamer bench network`, which trains over them; `gossamer demo`, the benchmarks and the tests use them too.
"""

from gossamer.netlab.counters import Counters
from gossamer.netlab.hosts import DEVICE, Hosts, missing, no_containers
from gossamer.netlab.job import Output, run_on_hosts
from gossamer.netlab.shaping import Shape

__all__ = ["DEVICE", "Counters", "Hosts", "Output", "Shape", "missing", "no_containers", "run_on_hosts"]
