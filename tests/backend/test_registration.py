"""How torch finds the backend, and how programs end that never say so."""

from importlib.metadata import entry_points

import pytest
import torch.distributed as dist

from tests.backend.jobs import TESTED
from tests.support.forks import fork_job
from tests.support.ranks import run_job

NO_CALL = """
import torch, torch.distributed as dist, gossamer
dist.init_process_group(BACKEND)
group = dist.new_group(backend=BACKEND)
t = torch.ones(100_000)
works = [dist.all_reduce(t, group=group, async_op=True) for _ in range(5)]
if dist.get_rank() == 0:
    works[-1].wait()
print("done", flush=True)
"""


@pytest.mark.timeout(100)
def test_a_program_that_ends_without_destroying_its_groups_ends_cleanly(tmp_path):
    out = fork_job(NO_CALL.replace("BACKEND", repr(TESTED)), 2, tmp_path)
    assert out.count("done") == 2


WITHOUT_THE_IMPORT = """
import sys, torch, torch.distributed as dist
assert "gossamer" not in sys.modules
dist.init_process_group("gossamer")
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [dist.get_world_size()] * 3, x
dist.destroy_process_group()
"""


def test_the_installed_package_tells_torch_where_the_backend_is():
    (entry,) = entry_points(group="torch.distributed.backends", name="gossamer")
    entry.load()()
    assert "gossamer" in dist.Backend.backend_list


@pytest.mark.skipif(
    not hasattr(dist.Backend, "_ensure_backend_registered"), reason="torch before 2.15 looks for no backends"
)
def test_a_program_needs_no_import_of_gossamer_from_torch_215_on(tmp_path):
    run_job(WITHOUT_THE_IMPORT, 2, tmp_path)
