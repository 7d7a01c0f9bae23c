"""Run by test_late_elastic.py as a worker: the loop of benchmarks/elastic_loop.py, on the simulated device.

The device's backend sends values through Gloo. Its operations fail as NCCL's do: if a rank dies, they never end by
themselves. One more entry of the plan:

    dies_in  {number of worker: number of an operation}: the worker dies as its device begins that operation
"""

import json
import os
import sys

import torch

from tests import ROOT
from tests.support import late_device

sys.path.insert(0, str(ROOT / "benchmarks"))

import elastic_loop

native = late_device.wired()
native.set_late(late_device.LATENESS["all"])
native.die_in(json.loads(sys.argv[3]).get("dies_in", {}).get(os.environ["GOSSAMER_ELASTIC_WORKER"], -1))

if __name__ == "__main__":
    torch.set_num_threads(1)
    elastic_loop.main()
