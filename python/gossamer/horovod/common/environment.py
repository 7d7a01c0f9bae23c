"""Horovod's environment variables: ``read()``, and tables of all that are known.

init() reads them, through gossamer.config. The launcher's variables (HOROVOD_RANK ...) are in gossamer.config itself.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gossamer import config
from gossamer.config import integer
from gossamer.errors import ConfigError

_log = logging.getLogger("gossamer")
_told: set[str] = set()


@dataclass(frozen=True)
class Knobs:
    """The settings of one session, with Horovod's defaults."""

    fusion_bytes: int = 128 << 20
    cache_capacity: int = 1024
    fuse_groups: bool = True
    stall_warning_s: float = 60.0  # 0: never
    stall_shutdown_s: float = 0.0  # 0: never
    timeline: str | None = None  # a file, or "DYNAMIC"
    mark_cycles: bool = False
    dynamic_process_sets: bool = False
    backend: str | None = None
    timeout_s: float | None = None
    log_level: str | None = None
    by_hosts: bool | None = None  # None: where ranks share hosts
    cross: tuple[int, int] | None = None  # rank and size across hosts, as another launcher gave them


def _flag(variable: str, text: str) -> bool:
    return integer(variable, text) > 0


def _count(variable: str, text: str) -> int:
    value = integer(variable, text)
    if value < 0:
        raise ConfigError(f"environment: {variable} must be at least 0, got {text!r}.")
    return value


def _seconds(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"environment: {variable} must be a number of seconds from 0, got {text!r}.")
    return value


def _timeout(variable: str, text: str) -> float:
    value = _seconds(variable, text)
    if value == 0:
        raise ConfigError(f"environment: {variable} must be above 0, got {text!r}.")
    return value


def _backend(variable: str, text: str) -> str:
    if text.lower() not in ("gloo", "gossamer"):
        raise ConfigError(
            f"environment: {variable} must be gloo or gossamer, got {text!r}; no MPI or oneCCL moves data here."
        )
    return text.lower()


def _level(variable: str, text: str) -> str:
    levels = {"trace": "DEBUG", "debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR"}
    levels |= {"fatal": "CRITICAL", "off": "CRITICAL"}
    if text.lower() not in levels:
        raise ConfigError(f"environment: {variable} must be one of {', '.join(levels)}, got {text!r}.")
    return levels[text.lower()]


# The field of Knobs that a variable sets, and the function that reads its text.
EFFECTIVE: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_bytes", _count),
    "HOROVOD_CACHE_CAPACITY": ("cache_capacity", _count),
    "HOROVOD_DISABLE_GROUP_FUSION": ("fuse_groups", lambda variable, text: not _flag(variable, text)),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_warning_s", _seconds),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("stall_shutdown_s", _seconds),
    "HOROVOD_STALL_CHECK_DISABLE": ("stall_disabled", _flag),
    "HOROVOD_TIMELINE": ("timeline", lambda _, text: text),
    "HOROVOD_TIMELINE_MARK_CYCLES": ("mark_cycles", _flag),
    "HOROVOD_DYNAMIC_PROCESS_SETS": ("dynamic_process_sets", _flag),
    "HOROVOD_CPU_OPERATIONS": ("backend", _backend),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": ("timeout_s", _timeout),
    "HOROVOD_LOG_LEVEL": ("log_level", _level),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": ("by_hosts", _flag),
    "HOROVOD_CROSS_RANK": ("cross_rank", _count),
    "HOROVOD_CROSS_SIZE": ("cross_size", _count),
}

# Read by gossamer.config, which finds a worker's place, or by the launcher.
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT")
_LAUNCH = ("HOSTNAME", "ELASTIC", "ELASTIC_TIMEOUT", "START_TIMEOUT")
ELSEWHERE = tuple(f"HOROVOD_{name}" for name in (*_PLACE, *_LAUNCH))

_TUNED = "the negotiation has no settings that need tuning; gs.Autotune tunes gs.DataParallel"
_ONE_LEVEL = (
    "only sums go by hosts (HOROVOD_HIERARCHICAL_ALLREDUCE); the rest goes between all ranks directly"
)

# Known, and why each needs no effect.
WITHOUT_EFFECT: dict[str, str] = {
    "HOROVOD_CYCLE_TIME": "nothing runs by a cycle: an operation is negotiated as soon as it is submitted",
    "HOROVOD_HIERARCHICAL_ALLGATHER": _ONE_LEVEL,
    "HOROVOD_TORUS_ALLREDUCE": _ONE_LEVEL,
    "HOROVOD_AUTOTUNE": _TUNED,
    "HOROVOD_AUTOTUNE_LOG": _TUNED,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _TUNED,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _TUNED,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _TUNED,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _TUNED,
    "HOROVOD_NUM_NCCL_STREAMS": "a process set has one stream",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "a fused buffer is always filled by one kernel",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "results are always ordered by stream events",
    "HOROVOD_CONTROLLER": "operations are always negotiated over torch.distributed",
    "HOROVOD_GLOO_IFACE": "Gloo takes GLOO_SOCKET_IFNAME",
    "HOROVOD_THREAD_AFFINITY": "a process set has one native thread, whose CPU the system chooses",
    "HOROVOD_MPI_THREADS_DISABLE": "MPI is used to meet, never to move data",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "MPI moves no data",
    "HOROVOD_CCL_BGT_AFFINITY": "there is no oneCCL",
    "HOROVOD_LOG_HIDE_TIME": "Python's logging decides what a line shows",
    "HOROVOD_DISABLE_NVTX_RANGES": "no NVTX ranges are made",
    "HOROVOD_MIXED_INSTALL": "only Horovod's own tests use it",
}


def read(variables: Mapping[str, str] | None = None) -> Knobs:
    """Returns the settings that the environment, or `variables`, asks for.

    A variable without effect is logged once, at debug level.

    Raises:
        ConfigError: a value cannot be read, or two values contradict each other.
    """
    found = config.variables("HOROVOD_") if variables is None else variables
    values: dict[str, Any] = {}
    for variable, text in found.items():
        if variable in EFFECTIVE and text:
            field, parse = EFFECTIVE[variable]
            values[field] = parse(variable, text)
        elif variable in WITHOUT_EFFECT:
            _tell(variable, f"has no effect: {WITHOUT_EFFECT[variable]}")
        elif variable not in EFFECTIVE and variable not in ELSEWHERE:
            _tell(variable, "is not known and has no effect")
    cross = values.pop("cross_rank", None), values.pop("cross_size", None)
    if None not in cross:
        values["cross"] = cross
    if values.pop("stall_disabled", False):
        return Knobs(**values | {"stall_warning_s": 0.0, "stall_shutdown_s": 0.0})
    settings = config.current()
    stall = {"stall_warning_s": settings.stall_warning_s, "stall_shutdown_s": settings.stall_shutdown_s}
    knobs = Knobs(**stall | values)
    if stall.keys() & values.keys() and 0 < knobs.stall_shutdown_s < knobs.stall_warning_s:
        raise ConfigError(
            "environment: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS must be at least HOROVOD_STALL_CHECK_TIME_SECONDS, "
            f"got {knobs.stall_shutdown_s:g} and {knobs.stall_warning_s:g}."
        )
    return knobs


def _tell(variable: str, what: str) -> None:
    if variable not in _told:
        _told.add(variable)
        _log.debug("gossamer: the environment variable %s %s", variable, what)
