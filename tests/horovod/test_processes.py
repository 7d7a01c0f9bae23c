# The Horovod face where one session does not show it: init and shutdown again, subsets of the workers, dynamic sets,
# the timeline, the stall report.

import importlib.util
import json
import shutil

import pytest

from tests.support.forks import fork_job

AGAIN = """
import torch, torch.distributed as dist, gossamer.horovod.torch as hvd
some = hvd.ProcessSet([0])
for turn in range(100):
    hvd.init(process_sets=[some])
    hvd.init()  # nothing
    assert dist.get_backend() == "gossamer"
    handle = hvd.allreduce_async(torch.full((2,), float(turn)), op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [2 * turn] * 2
    assert hvd.global_process_set.ranks == [0, 1]
    assert (some.process_set_id, some.included()) == (1, hvd.rank() == 0)
    if turn % 10 == 0:
        left = hvd.allreduce_async(torch.ones(2), name=f"only rank {hvd.rank()}")
        hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized() and not dist.is_initialized()
    assert (some.process_set_id, hvd.global_process_set.size()) == (None, None)
    if turn % 10 == 0:
        try:
            hvd.synchronize(left)
            raise SystemExit("no error")
        except hvd.HorovodInternalError as error:
            pass
hvd.shutdown()
print("is done")
"""


def test_init_and_shutdown_100_times(tmp_path) -> None:
    assert fork_job(AGAIN, 2, tmp_path).count("is done") == 2


SUBSETS = """
import pytest, torch, torch.distributed as dist, gossamer as gs, gossamer.horovod.torch as hvd
import os
world = int(os.environ["RANK"])
group = [[2, 0], [1, 3]][world % 2]
for turn in range(2):
    hvd.init(group, process_sets="dynamic")
    assert (hvd.rank(), hvd.size()) == (group.index(world), 2)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (hvd.rank(), 2, 0, 1)
    assert hvd.allgather(torch.tensor([world])).tolist() == group
    assert hvd.broadcast(torch.tensor([world]), 1).item() == group[1]
    hvd.shutdown()
with pytest.raises(ValueError, match="own rank"):
    hvd.init([(world + 1) % 4])
with pytest.raises(ValueError, match="different ranks"):
    hvd.init([world, world])

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
odd = hvd.ProcessSet([1, 3])
hvd.init(process_sets=[odd])
assert hvd.is_initialized() and hvd.size() == 4
three = hvd.add_process_set([3, 0, 1])
assert (three.process_set_id, three.ranks, three.size()) == (2, [0, 1, 3], 3)
if three.included():
    assert hvd.allgather(torch.tensor([world]), process_set=three).tolist() == [0, 1, 3]
    assert three.rank() == [0, 1, 3].index(world)
for ranks, text in (([1, 3], "there already"), ([0, 9], "0 to 3"), ([], "0 to 3"), (range(4), "there already")):
    with pytest.raises(ValueError, match=text):
        hvd.add_process_set(list(ranks))
for ranks in ([1, 1], [-1], [0.5], ["a"]):
    with pytest.raises(ValueError, match="ProcessSet"):
        hvd.ProcessSet(ranks)
with pytest.raises(ValueError, match="rank"):  # ranks disagree
    hvd.add_process_set([0, 1] if world else [0, 2])
assert hvd.remove_process_set(odd) is True
assert odd.process_set_id is None and odd.size() is None
assert hvd.remove_process_set(odd) is False
assert hvd.remove_process_set(hvd.global_process_set) is False
again = hvd.add_process_set(odd)
assert again is odd and odd.process_set_id == 3
if odd.included():
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=odd).item() == 2
if three.included():
    hvd.barrier(three)
hvd.shutdown()

with pytest.raises(ValueError, match="equal on all ranks"):
    hvd.init(process_sets=[hvd.ProcessSet([0, 1 + world % 2])])
with pytest.raises(ValueError, match="there already"):
    hvd.init(process_sets=[[0, 1], [1, 0]])
assert not hvd.is_initialized() and not dist.is_initialized()

gs.init(backend="gloo")  # a group that is there already is taken, and left
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 4
hvd.shutdown()
assert gs.size() == 4
hvd.init(list(range(4)))
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 4
hvd.shutdown()
with pytest.raises(ValueError, match="joined already"):
    hvd.init([0, 1, 2])
gs.shutdown()
dist.init_process_group("gloo")
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 4
hvd.shutdown()
assert dist.is_initialized()
dist.destroy_process_group()
print("is done")
"""


def test_some_of_the_workers_and_sets_that_come_and_go(tmp_path) -> None:
    assert fork_job(SUBSETS, 4, tmp_path).count("is done") == 4


REPORTS = """
import logging, os, time, pytest, torch, gossamer.horovod.torch as hvd
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append((record.levelname, record.getMessage()))
logging.getLogger("gossamer").addHandler(Keep())

hvd.init()
with pytest.raises(ValueError, match="HOROVOD_TIMELINE must be set"):
    hvd.start_timeline("no.json")
hvd.shutdown()
os.environ["HOROVOD_TIMELINE"] = "whole.json"
hvd.init()
hvd.allreduce(torch.ones(3), name="weights")
hvd.shutdown()
os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
hvd.init(process_sets=[hvd.ProcessSet([0])])
hvd.allreduce(torch.ones(3), name="before")
hvd.barrier()
hvd.start_timeline("part.json", mark_cycles=True)
for _ in range(3):
    hvd.allreduce(torch.ones(3), name="weights")
    hvd.allgather(torch.ones(3), name="rows")
    hvd.broadcast_(torch.ones(3), 0)
    hvd.grouped_allreduce([torch.ones(3)] * 2, name="both")
hvd.stop_timeline()
hvd.barrier()  # rank 0 has stopped before rank 1 goes on
hvd.allreduce(torch.ones(3), name="after")
if hvd.rank() == 0:
    with pytest.raises(ValueError, match="can be written"):
        hvd.start_timeline("/nowhere/x.json")
hvd.shutdown()

os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.3"
hvd.init()
if hvd.rank() == 0:
    hvd.allreduce(torch.ones(1), name="late")
else:
    time.sleep(0.8)
    hvd.allreduce(torch.ones(1), name="late")
hvd.shutdown()
level, text = next(line for line in lines if "late" in line[1])
assert level == "WARNING"
assert "allreduce.late" in text and "; come: rank 0; not come: rank 1" in text and "job.py:" in text, text
assert ("this is rank 1; its main thread:" in text and "time.sleep" in text) == (os.environ["RANK"] == "1"), text
os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "0.6"
hvd.init()
with pytest.raises(hvd.HorovodInternalError):
    hvd.allreduce(torch.ones(1), name=f"only {hvd.rank()}")
with pytest.raises(hvd.HorovodInternalError):
    hvd.allreduce(torch.ones(1))
hvd.shutdown()
print("is done")
"""


def test_timeline_and_stall_report(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fork_job(REPORTS, 2, tmp_path).count("is done") == 2
    whole, part = (json.loads((tmp_path / name).read_text()) for name in ("whole.json", "part.json"))
    for events in (whole, part):
        assert events[0]["args"]["start_time_since_epoch_in_micros"] > 1e15
    shown = {event["args"]["name"] for event in part if event["name"] == "process_name"}
    assert {"allreduce.weights", "allgather.rows", "grouped_allreduce.both_1of2"} <= shown
    assert not shown & {"allreduce.before", "allreduce.after"}
    names = [event["name"] for event in part]
    for kind in ("ALLREDUCE", "ALLGATHER", "BROADCAST"):
        assert names.count(f"NEGOTIATE_{kind}") % 2 == names.count(kind) % 2 == 0  # begun and ended
        assert names.count(kind) >= 6, kind
    assert names.count("CYCLE_START") >= 3
    assert "CYCLE_START" not in [event["name"] for event in whole]
    times = [event["ts"] for event in part if "ts" in event]
    assert min(times) >= 0


PLACED = """
import os, sys, json, pytest, torch, gossamer.horovod.torch as hvd
for turn in range(2):
    hvd.init()
    family = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
    same = hvd.mpi_ops.is_homogeneous()
    hvd.shutdown()
with open(f"place{family[0]}.json", "w") as file:  # mpirun mixes the lines of its workers
    json.dump([family, same], file)
"""


def test_an_outside_launcher_places_workers_on_unequal_hosts(fork, free_port, tmp_path) -> None:
    hosts = [[0, 0, 2], [0, 1, 2], [1, 0, 1]]  # of each rank: host, local rank, local size
    workers = []
    for rank, (host, local_rank, local_size) in enumerate(hosts):
        place = {
            "RANK": rank,
            "SIZE": 3,
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": local_size,
            "CROSS_RANK": host,
        }
        place |= {"GLOO_RENDEZVOUS_ADDR": "localhost", "GLOO_RENDEZVOUS_PORT": free_port}
        workers.append(
            fork(["-c", PLACED], env={f"HOROVOD_{name}": str(value) for name, value in place.items()})
        )
    for worker in workers:
        code, _, err = worker.finish()
        assert code == 0, err
    got = [json.loads((tmp_path / f"place{rank}.json").read_text()) for rank in range(3)]
    assert got == [[[0, 3, 0, 2, 0, 2], False], [[1, 3, 1, 2, 0, 1], False], [[2, 3, 0, 1, 1, 2], False]]


MPI = (
    PLACED
    + """
from mpi4py import MPI
assert hvd.mpi_enabled() and hvd.mpi_built() and hvd.mpi_threads_supported() in (True, False)
world = MPI.COMM_WORLD
half = world.Split(world.rank % 2, -world.rank)  # numbered from behind
hvd.init(half, process_sets=[hvd.ProcessSet([0])])
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (half.rank, 2, half.rank, 2)
assert hvd.allgather(torch.tensor([world.rank])).tolist() == [[2, 0], [3, 1]][world.rank % 2]
hvd.shutdown()
own, last = hvd.ProcessSet(half), hvd.ProcessSet([3])
hvd.init(world, process_sets=[own, last])
assert own.ranks == [[0, 2], [1, 3]][world.rank % 2]
assert hvd.allgather(torch.tensor([world.rank]), process_set=own).tolist() == own.ranks
assert (own.process_set_id, last.process_set_id) == (1 + world.rank % 2, 3)
hvd.shutdown()
open(f"done{world.rank}", "w").close()
"""
)


def test_workers_and_sets_of_mpi_communicators(start, tmp_path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "4"]
    code, _, err = start(["-c", MPI], prefix=mpirun, env={"MPI4PY_MPIABI": "openmpi"}).finish()
    assert code == 0, err
    assert all((tmp_path / f"done{rank}").exists() for rank in range(4))
    assert json.loads((tmp_path / "place3.json").read_text()) == [[3, 4, 3, 4, 0, 1], True]
