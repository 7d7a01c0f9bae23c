"""Run by test_late_elastic.py as a worker: the loop of benchmarks/elastic_loop.py, on the simulated device.

The device's backend sends values through Gloo. Its operations fail as NCCL's do: if a rank dies, they never end by
themselves. One more entry of the plan:

    dies_in  {number of worker: number of an operation}: the worker dies as its device begins that operation
"""

import json
import os
import sys

import torch

from gossamer.comm import c10d
from gossamer.engine import connections, face
from tests import ROOT
from tests.support import late_device

sys.path.insert(0, str(ROOT / "benchmarks"))

import elastic_loop

native = late_device.load()
make_backend, ground_of = c10d.make_backend, c10d.ground_of


def make_late_backend(kind, store, rank, size, timeout):
    if kind != "nccl":
        return make_backend(kind, store, rank, size, timeout)
    return native.Wired(make_backend("gloo", store, rank, size, timeout))


def ground_with_late(group):
    ground = ground_of(group)
    ground.kinds["late"] = "nccl"
    return ground


def device_of(module):
    return next(module.parameters()).device


c10d.make_backend, c10d.ground_of = make_late_backend, ground_with_late
connections.device_of = face.device_of = device_of
native.set_late(late_device.LATENESS["all"])
native.die_in(json.loads(sys.argv[3]).get("dies_in", {}).get(os.environ["GOSSAMER_ELASTIC_WORKER"], -1))

if __name__ == "__main__":
    torch.set_num_threads(1)
    elastic_loop.main()
