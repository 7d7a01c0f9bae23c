# HOROVOD_* variables: those with an effect, those that are known but have none, and the worker's rank from them.

import logging

import pytest

import gossamer.horovod.torch as hvd
from gossamer import ConfigError, config
from gossamer.config import Placement
from gossamer.horovod.common import environment
from gossamer.horovod.common.environment import EFFECTIVE, ELSEWHERE, WITHOUT_EFFECT, Knobs, read


def test_without_variables_horovods_defaults_hold() -> None:
    assert read() == Knobs()
    assert read({}) == Knobs(fusion_bytes=134217728, cache_capacity=1024, stall_warning_s=60.0)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {"fusion_bytes": 0}),
        ({"HOROVOD_CACHE_CAPACITY": "7"}, {"cache_capacity": 7}),
        ({"HOROVOD_DISABLE_GROUP_FUSION": "1"}, {"fuse_groups": False}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, {"stall_warning_s": 5.0}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}, {"stall_shutdown_s": 90.0}),
        (
            {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"},
            {"stall_warning_s": 0.0, "stall_shutdown_s": 0.0},
        ),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, {"timeline": "DYNAMIC"}),
        ({"HOROVOD_TIMELINE_MARK_CYCLES": "1"}, {"mark_cycles": True}),
        ({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, {"dynamic_process_sets": True}),
        ({"HOROVOD_CPU_OPERATIONS": "GLOO"}, {"backend": "gloo"}),
        ({"HOROVOD_CPU_OPERATIONS": ""}, {}),
        ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "12"}, {"timeout_s": 12.0}),
        ({"HOROVOD_LOG_LEVEL": "trace"}, {"log_level": "DEBUG"}),
        ({"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "3"}, {"cross": (1, 3)}),
    ],
)
def test_variable_sets_its_knob(variables, expected) -> None:
    assert read(variables) == Knobs(**expected)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HOROVOD_FUSION_THRESHOLD": "64MB"}, "HOROVOD_FUSION_THRESHOLD must be an integer, got '64MB'"),
        ({"HOROVOD_FUSION_THRESHOLD": "-1"}, "at least 0, got '-1'"),
        ({"HOROVOD_CACHE_CAPACITY": "many"}, "got 'many'"),
        ({"HOROVOD_DYNAMIC_PROCESS_SETS": "true"}, "got 'true'"),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "nan"}, "seconds from 0, got 'nan'"),
        ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "0"}, "above 0, got '0'"),
        (
            {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"},
            "at least HOROVOD_STALL_CHECK_TIME_SECONDS.* 30 and 60",
        ),
        ({"HOROVOD_CPU_OPERATIONS": "mpi"}, "must be gloo or gossamer, got 'mpi'"),
        ({"HOROVOD_LOG_LEVEL": "loud"}, "got 'loud'"),
    ],
)
def test_value_that_means_nothing_is_an_error_that_shows_it(variables, message, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=message):
        read(variables)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=message):
        hvd.init()
    assert not hvd.is_initialized()


def test_variable_without_effect_says_so_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(environment, "_told", set())
    caplog.set_level(logging.DEBUG, "gossamer")
    for _ in range(2):
        assert read({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_AUTOTUNE": "1", "HOROVOD_MADE_UP": "1"}) == Knobs()
    texts = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 3
    assert sum("HOROVOD_CYCLE_TIME has no effect: nothing runs by a cycle" in text for text in texts) == 1
    assert sum("HOROVOD_MADE_UP is not known" in text for text in texts) == 1


def test_every_variable_stands_in_one_table() -> None:
    tables = [set(EFFECTIVE), set(ELSEWHERE), set(WITHOUT_EFFECT)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert all(reason for reason in WITHOUT_EFFECT.values())
    settings = set(Knobs.__dataclass_fields__) | {"stall_disabled", "cross_rank", "cross_size"}
    assert {setting for setting, _ in EFFECTIVE.values()} == settings - {"cross"}


PLACE = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
}
GLOO = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "host1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234"}
MASTER = {"MASTER_ADDR": "host0", "MASTER_PORT": "29400"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")} | {
    f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (PLACE | GLOO, Placement("horovod", 5, 8, 1, 4, "host1", 1234)),
        (PLACE | MASTER, Placement("horovod", 5, 8, 1, 4, "host0", 29400)),
        (PLACE | GLOO | MASTER, Placement("horovod", 5, 8, 1, 4, "host0", 29400)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"} | GLOO, Placement("horovod", 1, 2, 1, 2, "host1", 1234)),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, Placement("horovod", 0, 1, 0, 1)),
        ({"HOROVOD_RANK": "0"}, None),
        (PLACE | TORCHRUN | MASTER, Placement("torchrun", 0, 2, 0, 2, "host0", 29400)),
        (PLACE | OPEN_MPI, Placement("mpirun", 1, 2, 1, 2)),
    ],
)
def test_an_outside_launcher_gives_the_place(monkeypatch, variables, expected) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert config.launcher_environment() == expected
    assert config.node_rank() == int(variables.get("HOROVOD_CROSS_RANK", 0))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (PLACE, "no address to meet at"),
        (PLACE | GLOO | {"HOROVOD_RANK": "8"}, "horovod.: rank must be .* got 8 of 8"),
        (PLACE | GLOO | {"HOROVOD_SIZE": "x"}, "HOROVOD_SIZE must be an integer, got 'x'"),
    ],
)
def test_a_place_that_cannot_be_is_an_error(monkeypatch, variables, message) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message):
        config.launcher_environment()
