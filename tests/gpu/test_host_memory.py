"""Sums through memory of the host with processes that share one GPU: the bits of Gloo and of the CPU.

Run by `make gpu-check`. Each process maps the memory for the GPU, as it would where GPUs have no peer access.
"""

import pytest

from tests.gpu.test_symmetric import BEGIN, GRAPHS, SUMS, TRAINING
from tests.support.gpu import needs_gpu
from tests.support.ranks import run_job

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]


def through_host(script: str) -> str:
    """The same script with memory of the host in place of symmetric memory."""
    changes = {
        "own = comms.symmetric(comm, control)": "own = comms.host_memory(comm, control)",
        "gs.Symmetric()": "gs.HostMemory()",
        # Buckets are on the GPU, so no sum is made in their place.
        "return weights(network), all(direct)": "return weights(network), not any(direct)",
    }
    for before, after in changes.items():
        script = script.replace(before, after)
    assert "ymmetric" not in script
    return BEGIN + script


@pytest.mark.parametrize("size", [2, 4])
def test_sums_through_memory_of_the_host_have_the_bits_of_gloo_and_of_the_cpu(size, tmp_path):
    assert run_job(through_host(SUMS), size, tmp_path).split()[-1] == "1"


def test_models_train_to_the_bits_of_gloo(tmp_path):
    assert run_job(through_host(TRAINING), 2, tmp_path).split()[-1] == "1"


def test_a_captured_step_replays_as_the_eager_one_goes_and_others_are_refused(tmp_path):
    assert run_job(through_host(GRAPHS), 2, tmp_path).split()[-1] == "1"


MEMORY = """
def mapped(what="memfd:gossamer"):
    with open("/proc/self/maps") as file:
        return sum(what in line for line in file)

comm, control = comms.private(None, device)
before, in_shm = mapped(), mapped("/dev/shm")
own = comms.host_memory(comm, control)
for numel in (1000, 2_000_000, 100):
    x = torch.full((numel,), gs.rank() + 1.0, device=device)
    gs.all_reduce(x, codec=gs.Int8(), group=own)
    torch.cuda.synchronize()
apart = mapped("/dev/shm") == in_shm
del own
report(mapped() == before, apart)
"""

DEATH = """
import os, time
from datetime import timedelta
comm, control = comms.private(None, device)
comms.c10d.origins[control].timeout = timedelta(seconds=5)
own = comms.host_memory(comm, control)
x = torch.ones(1000, device=device)
gs.all_reduce(x, codec=gs.Int8(), group=own)
torch.cuda.synchronize()
control.all_reduce(torch.zeros(1)).wait()
if gs.rank() == 1:
    os._exit(0)
text = ""
try:
    gs.all_reduce(x, codec=gs.Int8(), group=own)
    torch.cuda.synchronize()
except RuntimeError:
    try:
        gs.all_reduce(x, codec=gs.Int8(), group=own)
    except RuntimeError as error:
        text = str(error)
print(int("rank 1 did not come in time" in text), text, flush=True)
os._exit(0)
"""


def test_memory_is_given_back(tmp_path):
    assert run_job(BEGIN + MEMORY, 2, tmp_path).split()[-1] == "1"


def test_a_rank_that_ends_is_named(tmp_path):
    assert run_job(BEGIN + DEATH, 2, tmp_path).split()[0] == "1"
