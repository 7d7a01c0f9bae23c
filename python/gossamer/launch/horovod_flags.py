# horovodrun's flags in `gossamer run`: flags that set a HOROVOD_* variable of the workers, flags that are refused
# with a reason, and the file that may hold all of them. gossamer/horovod acts on the variables in the workers. Flags
# of hosts and ssh are in hosts.py, elastic flags in elastic/command.py. run.py calls it.
"""horovodrun's flags for the workers' settings."""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from gossamer import __version__
from gossamer.errors import ConfigError
from gossamer.horovod.common.environment import WITHOUT_EFFECT


class Knob(NamedTuple):
    """A flag and the variable that it sets."""

    dest: str
    variable: str
    kind: type
    summary: str = ""  # empty if the variable has no effect
    scale: int = 1
    inverted: bool = False

    @property
    def flag(self) -> str:
        return _flag(self.dest)


def _flag(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"


KNOBS = (
    Knob(
        "fusion_threshold_mb", "HOROVOD_FUSION_THRESHOLD", int, "fuse up to this many MiB; 0: never", 1 << 20
    ),
    Knob("cycle_time_ms", "HOROVOD_CYCLE_TIME", float),
    Knob(
        "cache_capacity", "HOROVOD_CACHE_CAPACITY", int, "operations whose agreement is remembered; 0: none"
    ),
    Knob(
        "hierarchical_allreduce",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        bool,
        "sum inside each of several hosts first; default: where ranks share hosts",
    ),
    Knob("hierarchical_allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", bool),
    Knob("torus_allreduce", "HOROVOD_TORUS_ALLREDUCE", bool),
    Knob("autotune", "HOROVOD_AUTOTUNE", bool),
    Knob("autotune_log_file", "HOROVOD_AUTOTUNE_LOG", str),
    Knob("autotune_warmup_samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int),
    Knob("autotune_steps_per_sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int),
    Knob("autotune_bayes_opt_max_samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int),
    Knob("autotune_gaussian_process_noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float),
    Knob("timeline_filename", "HOROVOD_TIMELINE", str, "rank 0 writes a Chrome trace there"),
    Knob("timeline_mark_cycles", "HOROVOD_TIMELINE_MARK_CYCLES", bool, "with a mark at each cycle"),
    Knob("stall_check", "HOROVOD_STALL_CHECK_DISABLE", bool, "warn of operations that wait", inverted=True),
    Knob("stall_check_warning_time_seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", int, "warn after"),
    Knob(
        "stall_check_shutdown_time_seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", int, "end after; 0: never"
    ),
    Knob("mpi_threads_disable", "HOROVOD_MPI_THREADS_DISABLE", bool),
    Knob("num_nccl_streams", "HOROVOD_NUM_NCCL_STREAMS", int),
    Knob("thread_affinity", "HOROVOD_THREAD_AFFINITY", str),
    Knob("gloo_timeout_seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", int, "of one operation"),
    Knob("start_timeout", "HOROVOD_START_TIMEOUT", int, "seconds until all hosts must be ready; 30"),
    Knob("log_level", "HOROVOD_LOG_LEVEL", str, "trace, debug, info, warning, error or fatal"),
    Knob("log_with_timestamp", "HOROVOD_LOG_HIDE_TIME", bool, inverted=True),
)
# Sections of horovodrun's configuration file, and the prefix that makes a key of each a flag.
SECTIONS = {
    "params": "",
    "autotune": "autotune_",
    "timeline": "timeline_",
    "stall_check": "stall_check_",
    "library_options": "",
    "logging": "log_",
}
TOP: dict[str, type] = dict.fromkeys(("hosts", "hostfile", "identity_file", "output_filename"), str)
TOP |= {"num_proc": int, "remote_port": int, "verbose": bool, "as_horovod": bool}
SPELLED = {"np": "num_proc", "ssh_port": "remote_port", "ssh_identity_file": "identity_file"}
MPI = "start the script with `mpirun -np N python train.py` instead; gs.init() and hvd.init() know it"
REFUSED = {
    "mpi": MPI,
    "mpi_args": MPI,
    "jsrun": "start the script with `srun` or `mpirun`; jsrun is not known",
    "binding_args": "use --numa-binding, which torch's agent understands",
}


class _CheckBuild(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(check_build())
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. A flag that is not given is None."""
    group = parser.add_argument_group("horovodrun's settings; each sets a HOROVOD_* variable of the workers")
    for knob in KNOBS:
        idle = WITHOUT_EFFECT.get(knob.variable)
        text = f"no effect: {idle}" if idle else f"{knob.summary} ({knob.variable})"
        if knob.kind is bool:
            group.add_argument(knob.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            group.add_argument(knob.flag, type=knob.kind, metavar="X", help=text)
    group.add_argument("--log-without-timestamp", dest="log_with_timestamp", action="store_false", default=None,
                       help="same as --no-log-with-timestamp")  # fmt: skip
    group.add_argument("--config-file", metavar="YAML", help="these flags in a file; the command line wins")
    add = parser.add_argument_group("other flags of horovodrun").add_argument
    add("-cb", "--check-build", action=_CheckBuild, nargs=0, help="what this build can do")
    add("-v", "--version", action="version", version=f"gossamer {__version__}")
    add("--gloo", action="store_true", help="is always so: torch's own agents start the workers")
    add("--disable-cache", action="store_true", help="is always so: each start asks all hosts")
    add("--tcp", action="store_true", help="no InfiniBand for NCCL (NCCL_IB_DISABLE=1)")
    for dest, instead in REFUSED.items():
        kind: dict[str, Any] = {"metavar": "ARGS"} if dest.endswith("_args") else {"action": "store_true"}
        add(_flag(dest), default=None, help=f"refused: {instead}", **kind)


def apply(args: argparse.Namespace) -> None:
    """Puts the flags into the environment, which the workers inherit.

    Raises:
        ConfigError: a flag has no meaning here, a value is out of its range, or the configuration file is wrong.
    """
    for dest, instead in REFUSED.items():
        if getattr(args, dest) is not None:
            raise ConfigError(f"{_flag(dest)} is not supported; {instead}")
    if args.config_file is not None:
        _fill_in(args, _read(args.config_file), args.config_file)
    for knob in KNOBS:
        if (value := getattr(args, knob.dest)) is not None:
            os.environ[knob.variable] = _text(knob, value)
            if idle := WITHOUT_EFFECT.get(knob.variable):
                print(f"gossamer run: no effect: {knob.flag}: {idle}", file=sys.stderr)
    if args.tcp:
        os.environ["NCCL_IB_DISABLE"] = "1"


def _text(knob: Knob, value: Any) -> str:
    if knob.kind is bool:
        return str(int(bool(value) != knob.inverted))
    if knob.kind is str:
        return str(value)
    if not value >= 0:
        raise ConfigError(f"{knob.flag} must be at least 0, got {value}")
    return str(value * knob.scale)


def _read(path: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"--config-file needs PyYAML ({error}); run `pip install pyyaml`") from error
    try:
        with open(path) as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config-file {path}: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config-file {path} must hold keys and values, got {type(content).__name__}")
    return content


def _fill_in(args: argparse.Namespace, content: Mapping[str, Any], path: str) -> None:
    kinds = {knob.dest: knob.kind for knob in KNOBS} | TOP
    for key, value in content.items():
        section = str(key).replace("-", "_")
        if section == "controller":
            if str(value).lower() != "gloo":
                raise ConfigError(f"--config-file {path}: controller must be gloo, got {value!r}; {MPI}")
            continue
        values = {section: value}
        if isinstance(value, Mapping) and section in SECTIONS:
            keys = {str(inner).replace("-", "_"): item for inner, item in value.items()}
            prefix = SECTIONS[section]
            values = {section if inner == "enabled" else prefix + inner: item for inner, item in keys.items()}
        for name, item in values.items():
            dest = SPELLED.get(name, name)
            if dest not in kinds:
                raise ConfigError(
                    f"--config-file {path}: {key}: {name} is not known; the known are {', '.join(kinds)}"
                )
            if getattr(args, dest) in (None, False) and item is not None:
                setattr(args, dest, _converted(item, kinds[dest], f"--config-file {path}: {name}"))


def _converted(item: Any, kind: type, where: str) -> Any:
    if kind is bool:
        if not isinstance(item, bool):
            raise ConfigError(f"{where} must be true or false, got {item!r}")
        return item
    try:
        return kind(item)
    except (TypeError, ValueError):
        raise ConfigError(f"{where} must be of type {kind.__name__}, got {item!r}") from None


def check_build() -> str:
    """Returns what horovodrun --check-build shows, for this build."""
    gloo, nccl, mpi = (
        "X" if available() else " "
        for available in (dist.is_gloo_available, dist.is_nccl_available, dist.is_mpi_available)
    )
    return (
        f"gossamer {__version__}\n\n"
        f"Frameworks:\n    [X] PyTorch\n    [ ] TensorFlow\n    [ ] MXNet\n\n"
        f"Controllers:\n    [X] Gloo\n    [ ] MPI (mpirun may start the workers)\n\n"
        f"Backends:\n    [X] gossamer\n    [{gloo}] Gloo\n    [{nccl}] NCCL\n    [{mpi}] MPI\n"
        f"    [ ] DDL\n    [ ] CCL"
    )
