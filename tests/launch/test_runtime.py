# runtime.py: joining alone, adopting torch's group, and real workers under torchrun's, mpirun's and
# srun's variables.

import importlib.util
import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from gossamer import ConfigError, runtime
from gossamer.config import Placement
from tests.support.ranks import run_threads

WORKER = """
import json, sys, torch, torch.distributed as dist, gossamer as gs
gs.init(timeout_s=30)
x = torch.tensor([gs.rank() + 1.0])
dist.all_reduce(x)
with open(f"place{gs.rank()}.json", "w") as file:  # mpirun mixes the lines of its workers
    json.dump([gs.rank(), gs.size(), gs.local_rank(), gs.local_size(), x.item()], file)
gs.shutdown()
"""


def places(folder: Path) -> list[list[float]]:
    """What each worker wrote: rank, size, local rank, local size, sum of (rank + 1)."""
    return [json.loads((folder / f"place{rank}.json").read_text()) for rank in range(2)]


EXPECTED = [[0, 2, 0, 2, 3.0], [1, 2, 1, 2, 3.0]]


@pytest.fixture
def _leave():
    yield
    gs.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


pytestmark = pytest.mark.usefixtures("_leave")


def test_without_a_launcher_the_process_is_alone() -> None:
    gs.init()
    assert (gs.rank(), gs.size(), gs.local_rank(), gs.local_size()) == (0, 1, 0, 1)
    assert gs.is_initialized()
    assert dist.get_world_size() == 1


def test_second_init_is_an_error_and_shutdown_allows_another() -> None:
    gs.init()
    with pytest.raises(ConfigError, match="must be called once.*rank 0 of 1"):
        gs.init()
    gs.shutdown()
    assert not gs.is_initialized()
    assert not dist.is_initialized()
    gs.shutdown()
    gs.init(backend="gloo", timeout_s=5.0)


@pytest.mark.parametrize("ask", [gs.rank, gs.size, gs.local_rank, gs.local_size])
def test_asking_before_init_is_an_error(ask) -> None:
    with pytest.raises(ConfigError, match="call gossamer.init"):
        ask()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_timeout_must_be_positive(timeout_s) -> None:
    with pytest.raises(ConfigError, match="timeout_s must be above 0"):
        gs.init(timeout_s=timeout_s)
    assert not dist.is_initialized()


def test_unknown_variable_stops_init(monkeypatch) -> None:
    monkeypatch.setenv("GOSSAMER_NO_SUCH", "1")
    with pytest.raises(ConfigError, match="GOSSAMER_NO_SUCH"):
        gs.init()


def test_group_of_the_caller_is_adopted_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="adopted as it is"):
        gs.init(backend="gloo")
    gs.init()
    assert (gs.rank(), gs.size(), gs.local_rank(), gs.local_size()) == (0, 1, 0, 1)
    gs.shutdown()
    assert dist.is_initialized()


def test_fewer_gpus_than_local_workers_is_an_error(monkeypatch) -> None:
    variables = {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"rank 2/3 is local worker 2 of 3, but 2 GPU\(s\) are visible"):
        gs.init(backend="cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(("gpus", "shared"), [((0, 1, 2), None), ((0, 1, 0), (0, 2)), ((0, 1, 1), (1, 2))])
def test_workers_that_each_see_one_gpu_must_see_different_ones(gpus, shared, monkeypatch) -> None:
    here, chosen, store = threading.local(), [], dist.HashStore()

    def of_this_worker(_index):
        return SimpleNamespace(uuid=f"uuid{here.gpu}")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", of_this_worker)
    monkeypatch.setattr(runtime, "_has_gpu", False)

    def body(rank):
        here.gpu = gpus[rank]
        place = Placement("srun", rank, len(gpus), rank, len(gpus))
        runtime._choose("cpu:gloo,cuda:nccl", place)
        runtime._require_own_gpu(store, place)

    errors = run_threads(len(gpus), body, errors=True)
    assert chosen == [0] * len(gpus)
    if shared is None:
        assert errors == [None] * len(gpus)
        return
    for error in errors:
        assert isinstance(error, ConfigError)
        assert f"ranks {shared[0]} and {shared[1]} of 3 share GPU-uuid{gpus[shared[0]]}" in str(error)


def test_missing_peer_is_an_error_naming_rank_and_address(monkeypatch, free_port) -> None:
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port,
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(gs.CommError, match=rf"rank 0/2 \(torchrun\) .*localhost:{free_port}.* in 2 s"):
        gs.init(timeout_s=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_for_a_worker_that_never_joins_is_told_meanwhile(rank, monkeypatch, free_port, caplog) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port}
    for name, value in (variables | {"GOSSAMER_STALL_WARNING_S": 0.3}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(gs.CommError):
        gs.init(timeout_s=2)
    told = [record.message for record in caplog.records]
    assert len(told) >= 2
    assert re.fullmatch(
        rf"gossamer: rank {rank}/2 has waited \d s for the other workers to join at localhost:{free_port}; see whether "
        rf"all 2 have started and none has ended; it gives up after 2 s",
        told[0],
    )
    monkeypatch.setenv("GOSSAMER_STALL_WARNING_S", "0")
    with pytest.raises(gs.CommError):
        gs.init(timeout_s=1)
    assert len(caplog.records) == len(told)
    assert "gossamer-joining" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_two_processes_meet_through_launcher_variables(fork, free_port, launcher, tmp_path) -> None:
    def variables(rank: int) -> dict[str, str]:
        if launcher == "torchrun":
            return {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(free_port),
            }
        return {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_JOB_ID": str(free_port),
            "SLURM_STEP_ID": "0",
        }

    workers = [fork(["-c", WORKER], env=variables(rank)) for rank in range(2)]
    for worker in workers:
        code, _, err = worker.finish()
        assert code == 0, err
    assert places(tmp_path) == EXPECTED


def test_two_processes_meet_under_mpirun(start, tmp_path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    code, _, err = start(["-c", WORKER], prefix=mpirun, env={"MPI4PY_MPIABI": "openmpi"}).finish()
    assert code == 0, err
    assert places(tmp_path) == EXPECTED


def test_mpirun_without_mpi4py_names_the_package(fork, tmp_path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('hidden by the test')\n")
    places = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in places.items()}
    code, _, err = fork(["-c", WORKER], env=variables).finish()
    assert code == 1
    assert "pip install mpi4py" in err.splitlines()[-1]
