"""Run by test_elastic.py as a worker: the loop of benchmarks/elastic_loop.py, with several workers on one GPU.

NCCL refuses ranks of one host that share a GPU. So each worker says that it is a host of its own.
"""

import os
import sys

from tests import ROOT

os.environ |= {
    "NCCL_HOSTID": f"host{os.environ['GOSSAMER_ELASTIC_WORKER']}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}
sys.path.insert(0, str(ROOT / "benchmarks"))

import elastic_loop

if __name__ == "__main__":
    elastic_loop.main()
