# Settings from the environment: GOSSAMER_* variables, and the variables that launchers set. Outside launch/ only this
# file reads os.environ. It decides nothing: runtime.py and the engine do.
"""Configuration from the environment."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from gossamer.errors import ConfigError

MIB = 1 << 20
LOG_LEVELS = ("debug", "info", "warning", "error")
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")  # the ends of Horovod's and Open MPI's names
_HOROVOD_ADDRESSES = (
    ("MASTER_ADDR", "MASTER_PORT"),
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
)
BUILD_VARIABLES = ("GOSSAMER_BUILD_CUDA",)  # read by setup.py alone
# torch's symmetric memory refuses ranks whose GPUs have the same index, unless this is set.
EQUAL_GPU_INDICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
ELASTIC_VARIABLES = ("GOSSAMER_ELASTIC_BOARD", "GOSSAMER_ELASTIC_WORKER", "GOSSAMER_ELASTIC_LAUNCHER")


@dataclass(frozen=True)
class Config:
    """Defaults that arguments override. Field ``x`` is read from ``GOSSAMER_X``."""

    bucket_bytes: int = 25 * MIB  # a bucket of gradients closes once it holds this much
    first_bucket_bytes: int = 1 * MIB  # smaller, so that the first transfer starts early
    timeout_s: float = 1800.0  # of one collective
    log_level: str = "warning"  # debug, info, warning or error
    stall_warning_s: float = 60.0  # a rank that waits longer logs a warning; 0: never
    stall_shutdown_s: float = 0.0  # a longer wait is an error on every rank; 0: never
    timeline: str | None = None  # the file of a trace that begins with the first wrapped model


@dataclass(frozen=True)
class Placement:
    """One worker's place among all, as its launcher described it."""

    source: str  # "torchrun", "horovod", "mpirun" or "srun"
    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str | None = None  # None where the launcher brings its own rendezvous (MPI)
    master_port: int | None = None


def current() -> Config:
    """Reads the environment now.

    Raises ConfigError for an unknown GOSSAMER_* variable and for a value that does not parse.
    """
    names = {f"GOSSAMER_{field.name.upper()}": field.name for field in fields(Config)}
    values: dict[str, Any] = {}
    for variable, text in variables("GOSSAMER_").items():
        if variable in names:
            values[names[variable]] = _PARSERS[names[variable]](variable, text)
        elif variable not in (*BUILD_VARIABLES, *ELASTIC_VARIABLES):
            known = ", ".join([*names, *BUILD_VARIABLES])
            raise ConfigError(f"environment: unknown variable {variable}; the known ones are {known}.")
    return Config(**values)


def allows_equal_gpu_indices() -> bool:
    """Whether torch's symmetric memory takes ranks whose GPUs have the same index, such as ranks on one GPU."""
    return os.environ.get(EQUAL_GPU_INDICES) == "1"


def allow_equal_gpu_indices() -> None:
    """Lets torch's symmetric memory take such ranks, in this process. torch reads the variable at each rendezvous."""
    os.environ[EQUAL_GPU_INDICES] = "1"


def launcher_environment() -> Placement | None:
    """Returns the place that a launcher gave this process, or None if no launcher started it.

    It looks in this order: torchrun, Horovod's variables, Open MPI's mpirun, MPICH's mpirun (PMI), Slurm's srun.
    Raises ConfigError for a launcher's variables that are incomplete or contradict each other.
    """
    found = (find(os.environ) for find in (_torchrun, _horovod, _open_mpi, _mpich, _srun))
    if (placement := next(filter(None, found), None)) is None:
        return None
    place, local = (placement.rank, placement.size), (placement.local_rank, placement.local_size)
    for what, (rank, size) in (("rank", place), ("local rank", local)):
        if not 0 <= rank < size:
            raise ConfigError(
                f"environment ({placement.source}): {what} must be at least 0 and below its size, "
                f"got {rank} of {size}."
            )
    return placement


def _torchrun(env: Mapping[str, str]) -> Placement | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise ConfigError(
            f"environment: RANK and WORLD_SIZE are set but {' and '.join(missing)} not; "
            "set both, or start with `gossamer run` or torchrun."
        )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return _placement("torchrun", env, names, ("MASTER_ADDR", "MASTER_PORT"))


def _horovod(env: Mapping[str, str]) -> Placement | None:
    if "HOROVOD_RANK" not in env or "HOROVOD_SIZE" not in env:
        return None
    # Rank 0 serves the store there.
    address = next((pair for pair in _HOROVOD_ADDRESSES if all(env.get(name) for name in pair)), None)
    if address is None and (_open_mpi(env) or _mpich(env)):
        return None  # they meet over MPI
    if address is None and integer("HOROVOD_SIZE", env["HOROVOD_SIZE"]) > 1:
        raise ConfigError(
            "environment: HOROVOD_RANK and HOROVOD_SIZE are set but no address to meet at; set MASTER_ADDR and "
            "MASTER_PORT, or HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT, to a free port of "
            "rank 0's host, or start with `gossamer run`."
        )
    return _placement("horovod", env, [f"HOROVOD_{name}" for name in _PLACE], address)


def _open_mpi(env: Mapping[str, str]) -> Placement | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in _PLACE]
    return _placement("mpirun", env, names) if all(name in env for name in names) else None


def _mpich(env: Mapping[str, str]) -> Placement | None:
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return None
    # `srun --mpi=pmi2` sets PMI_* too, and then needs no MPI. A hydra proxy started by srun differs.
    if env.get("SLURM_PROCID") == env["PMI_RANK"] and env.get("SLURM_STEP_NUM_TASKS") == env["PMI_SIZE"]:
        return None
    return _placement("mpirun", env, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _placement(
    source: str, env: Mapping[str, str], names: Sequence[str], address: tuple[str, str] | None = None
) -> Placement:
    """The placement that these variables describe.

    Args:
        names: the variables of rank, size, local rank and local size. Without the last two, there is one host.
        address: the variables of rank 0's address and port, if the launcher sets them.
    """
    rank, size = (integer(name, env[name]) for name in names[:2])
    local_rank = integer(names[2], env.get(names[2], str(rank)))
    local_size = integer(names[3], env.get(names[3], str(size)))
    where = (env[address[0]], integer(address[1], env[address[1]])) if address else (None, None)
    return Placement(source, rank, size, local_rank, local_size, *where)


def _srun(env: Mapping[str, str]) -> Placement | None:
    # A batch script has SLURM_PROCID=0 as well; only srun's tasks belong to a step with a node list.
    if "SLURM_PROCID" not in env or "SLURM_STEP_NODELIST" not in env:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if size_name not in env:
        raise ConfigError("environment: SLURM_PROCID is set but SLURM_NTASKS is not; start with srun.")
    size = integer(size_name, env[size_name])
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", str(size))
    port = env.get("MASTER_PORT")
    return Placement(
        source="srun",
        rank=integer("SLURM_PROCID", env["SLURM_PROCID"]),
        size=size,
        local_rank=integer("SLURM_LOCALID", env.get("SLURM_LOCALID", "0")),
        local_size=_tasks_on_node(tasks, integer("SLURM_NODEID", env.get("SLURM_NODEID", "0"))),
        master_addr=env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
        master_port=integer("MASTER_PORT", port) if port else _slurm_port(env),
    )


def node_rank() -> int:
    """Returns this host's number among the hosts of the run, as its launcher counted them; 0 if no launcher did.

    It looks in GROUP_RANK (torchrun), NODE_RANK, SLURM_NODEID and HOROVOD_CROSS_RANK, in this order.
    """
    for variable in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID", "HOROVOD_CROSS_RANK"):
        if variable in os.environ:
            return integer(variable, os.environ[variable])
    return 0


def launched_by() -> str | None:
    """Returns the ``source`` of launcher_environment(), or None."""
    return getattr(launcher_environment(), "source", None)


def variables(prefix: str) -> dict[str, str]:
    """Returns the variables whose names begin with `prefix`, for a face that reads another package's variables."""
    return {variable: text for variable, text in os.environ.items() if variable.startswith(prefix)}


def master_addr() -> str:
    """Returns MASTER_ADDR, or 127.0.0.1 without it."""
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


def bagua_bucket_bytes() -> int:
    """BAGUA_DEFAULT_BUCKET_SIZE, which Bagua's launchers set, or its default of 10 MiB."""
    name = "BAGUA_DEFAULT_BUCKET_SIZE"
    return _positive_bytes(name, os.environ[name]) if name in os.environ else 10 * MIB


def bagua_autotune() -> bool:
    """Whether BAGUA_AUTOTUNE, which Bagua's launchers set, is above 0."""
    text = os.environ.get("BAGUA_AUTOTUNE") or "0"
    if not text.isdigit():
        raise ConfigError(f"environment: BAGUA_AUTOTUNE must be an integer from 0, got {text!r}.")
    return int(text) > 0


def first_host(node_list: str) -> str:
    """First host of a Slurm node list: ``"gpu[07-09,12]-ib,login1"`` gives ``"gpu07-ib"``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list.strip())
    if first is None:
        raise ConfigError(f"environment: SLURM_STEP_NODELIST names no host, got {node_list!r}.")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Slurm writes ``"2(x3),1"`` for four nodes with 2, 2, 2 and 1 tasks."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(
                f"environment: SLURM_STEP_TASKS_PER_NODE must look like '2(x3),1', got {tasks_per_node!r}."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ConfigError(f"environment: SLURM_NODEID {node} is not in {tasks_per_node!r} (task counts).")
    return counts[node]


def _slurm_port(env: Mapping[str, str]) -> int:
    """The same port for all tasks of a step. Below 32768: Linux gives the ports above to outgoing connections."""
    job, step = env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")
    return 15000 + (integer("SLURM_JOB_ID", job) + 997 * integer("SLURM_STEP_ID", step)) % 15000


def integer(variable: str, text: str) -> int:
    """Returns the integer that a variable's text says. Raises ConfigError for any other text."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment: {variable} must be an integer, got {text!r}.") from None


def _positive_bytes(variable: str, text: str) -> int:
    value = integer(variable, text)
    if value < 1:
        raise ConfigError(f"environment: {variable} must be at least 1 byte, got {text!r}.")
    return value


def _positive_seconds(variable: str, text: str, *, or_never: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf or (or_never and value == 0)):
        above = "above 0 (0: never)" if or_never else "above 0"
        raise ConfigError(f"environment: {variable} must be a number of seconds {above}, got {text!r}.")
    return value


def _level(variable: str, text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ConfigError(f"environment: {variable} must be one of {', '.join(LOG_LEVELS)}, got {text!r}.")
    return text.lower()


def _file(variable: str, text: str) -> str:
    if not text:
        raise ConfigError(f"environment: {variable} must name a file, got ''; unset it for none.")
    return text


_PARSERS: dict[str, Callable[[str, str], int | float | str]] = {
    "bucket_bytes": _positive_bytes,
    "first_bucket_bytes": _positive_bytes,
    "timeout_s": _positive_seconds,
    "log_level": _level,
    "stall_warning_s": partial(_positive_seconds, or_never=True),
    "stall_shutdown_s": partial(_positive_seconds, or_never=True),
    "timeline": _file,
}
