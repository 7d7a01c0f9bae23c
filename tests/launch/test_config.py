# config.py: GOSSAMER_* variables, and the place in the group that each launcher's variables describe.

import dataclasses

import pytest

from gossamer import config
from gossamer.config import Config, Placement
from gossamer.errors import ConfigError


def test_defaults_hold_without_variables() -> None:
    assert config.current() == Config(25 << 20, 1 << 20, 1800.0, "warning", 60.0, 0.0)


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.current().timeout_s = 1.0  # type: ignore[misc]


def test_each_field_is_read_from_its_variable(monkeypatch) -> None:
    for field, text in (
        ("BUCKET_BYTES", "1000"),
        ("FIRST_BUCKET_BYTES", "10"),
        ("TIMEOUT_S", "2.5"),
        ("LOG_LEVEL", "Info"),
        ("STALL_WARNING_S", "7.5"),
        ("STALL_SHUTDOWN_S", "0"),
    ):
        monkeypatch.setenv(f"GOSSAMER_{field}", text)
    assert config.current() == Config(1000, 10, 2.5, "info", 7.5, 0.0)


def test_unknown_variable_is_an_error_that_lists_the_known(monkeypatch) -> None:
    monkeypatch.setenv("GOSSAMER_BUCKET_BYTE", "1")
    with pytest.raises(
        ConfigError, match=r"GOSSAMER_BUCKET_BYTE;.*GOSSAMER_BUCKET_BYTES.*GOSSAMER_LOG_LEVEL"
    ):
        config.current()


def test_build_variable_is_known_and_ignored(monkeypatch) -> None:
    monkeypatch.setenv("GOSSAMER_BUILD_CUDA", "0")
    assert config.current() == Config()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("BUCKET_BYTES", "25MiB"),
        ("BUCKET_BYTES", "0"),
        ("FIRST_BUCKET_BYTES", "-1"),
        ("TIMEOUT_S", "soon"),
        ("TIMEOUT_S", "0"),
        ("TIMEOUT_S", "inf"),
        ("TIMEOUT_S", "nan"),
        ("STALL_WARNING_S", "-1"),
        ("STALL_SHUTDOWN_S", "soon"),
        ("STALL_SHUTDOWN_S", "inf"),
        ("LOG_LEVEL", "loud"),
        ("LOG_LEVEL", ""),
    ],
)
def test_bad_value_is_an_error_that_names_variable_and_value(monkeypatch, variable, text) -> None:
    monkeypatch.setenv(f"GOSSAMER_{variable}", text)
    with pytest.raises(ConfigError, match=f"GOSSAMER_{variable}.*got '{text}'"):
        config.current()


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "host0", "MASTER_PORT": "29400"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "1",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"RANK": "0"}, None),
        (TORCHRUN | MASTER, Placement("torchrun", 5, 8, 1, 4, "host0", 29400)),
        (OPEN_MPI, Placement("mpirun", 3, 4, 1, 2)),
        (MPICH, Placement("mpirun", 3, 4, 1, 2)),
        (SRUN, Placement("srun", 3, 5, 0, 1, "gpu07", 15000 + 1234 + 997)),
        (SRUN | MASTER, Placement("srun", 3, 5, 0, 1, "host0", 29400)),
        # A batch script outside srun is one process, whatever the allocation holds.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),
        # torchrun inside an srun task; mpirun whose daemon srun started; srun --mpi=pmi2.
        (SRUN | TORCHRUN | MASTER, Placement("torchrun", 5, 8, 1, 4, "host0", 29400)),
        (SRUN | OPEN_MPI, Placement("mpirun", 3, 4, 1, 2)),
        (
            SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5", "SLURM_STEP_NUM_TASKS": "5"},
            Placement("srun", 3, 5, 0, 1, "gpu07", 15000 + 1234 + 997),
        ),
    ],
)
def test_launcher_variables_give_the_place(monkeypatch, variables, expected) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert config.launcher_environment() == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN, "MASTER_ADDR and MASTER_PORT"),
        (TORCHRUN | MASTER | {"RANK": "8"}, "rank must be at least 0 and below its size, got 8 of 8"),
        (TORCHRUN | MASTER | {"RANK": "x"}, "RANK must be an integer, got 'x'"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "local rank must be .* got 2 of 2"),
        (SRUN | {"SLURM_NODEID": "4"}, "SLURM_NODEID 4"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE must look like"),
    ],
)
def test_contradicting_launcher_variables_are_errors(monkeypatch, variables, message) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message):
        config.launcher_environment()


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("localhost", "localhost"),
        ("a,b", "a"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3,5]-ib", "gpu3-ib"),
        ("rack[1-2]node[04-06]", "rack1node04"),
        ("my-host-[001-128]", "my-host-001"),
    ],
)
def test_first_host_of_a_slurm_node_list(node_list, first) -> None:
    assert config.first_host(node_list) == first


def test_empty_node_list_is_an_error() -> None:
    with pytest.raises(ConfigError, match="names no host"):
        config.first_host("")
