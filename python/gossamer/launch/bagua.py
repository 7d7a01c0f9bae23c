# Bagua's launchers, `python -m gossamer.bagua.distributed.run` and `.launch`, run `gossamer run`. Bagua's own flags are
# translated, refused, or printed as without effect. Others are torchrun's. Used by gossamer/bagua/distributed/.
"""Bagua's launchers."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from gossamer.errors import ConfigError, GossamerError
from gossamer.launch import run

VARIABLES = {"autotune_level": "BAGUA_AUTOTUNE", "default_bucket_size": "BAGUA_DEFAULT_BUCKET_SIZE"}
SWITCH, VALUE = {"action": "store_true"}, {"metavar": "X"}
# Flags of Bagua's autotune service, which does not exist here. They change nothing that a script computes.
IDLE: dict[str, dict[str, Any]] = {
    "bagua_service_port": VALUE,
    "autotune_max_samples": VALUE,
    "autotune_sampling_confidence_time": VALUE,
    "autotune_warmup_time": VALUE,
    "is_output_autotune_log": SWITCH,
    "report_metrics": SWITCH,
}
# Flags that a script may rely on, and what to do instead.
SAME_COMMAND = "start the same command on each host, with --nnodes, --rdzv_backend c10d and --rdzv_endpoint"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "host_list": (VALUE, SAME_COMMAND),
    "ssh_port": (VALUE, SAME_COMMAND),
    "enable_bagua_net": (SWITCH, "NCCL's own transports are used; leave it out"),
    "set_additional_flag": (SWITCH, "read LOCAL_RANK in the script, or call bagua.get_local_rank()"),
}


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Runs `python -m gossamer.bagua.distributed.<name>`, and returns the exit code."""
    prog = f"python -m gossamer.bagua.distributed.{name}"
    args = build_parser(prog).parse_args(argv)
    try:
        translate(args)
        return run.main(args)
    except GossamerError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Returns the parser of `gossamer run` with Bagua's own flags."""
    parser = run.build_parser(prog)
    group = parser.add_argument_group("Bagua's flags")
    group.add_argument("--default_bucket_size", type=int, metavar="BYTES", help="bytes of a bucket")
    group.add_argument("--logdir", help="same as --log-dir")
    group.add_argument("--autotune_level", type=int, help="above 0: models are tuned while they train")
    for flag, kind in IDLE.items():
        group.add_argument(f"--{flag}", default=None, help="no effect", **kind)
    for flag, (kind, instead) in REFUSED.items():
        group.add_argument(f"--{flag}", default=None, help=f"refused: {instead}", **kind)
    return parser


def translate(args: argparse.Namespace) -> None:
    """Puts Bagua's flags into effect, and removes them from ``args``.

    Raises:
        ConfigError: a flag is not supported, or the bucket size is below 1.
    """
    names = ("default_bucket_size", "logdir", "autotune_level", *IDLE, *REFUSED)
    given = {name: value for name in names if (value := vars(args).pop(name)) is not None}
    if refused := [name for name in REFUSED if name in given]:
        raise ConfigError(f"--{refused[0]} is not supported; {REFUSED[refused[0]][1]}")
    if (level := given.get("autotune_level", 0)) < 0:
        raise ConfigError(f"--autotune_level must be at least 0, got {level}")
    if (size := given.get("default_bucket_size", 1)) < 1:
        raise ConfigError(f"--default_bucket_size must be at least 1 byte, got {size}")
    if idle := [f"--{name}" for name in IDLE if name in given]:
        print(f"bagua: no effect, as there is no autotune service: {', '.join(idle)}", file=sys.stderr)
    for name, variable in VARIABLES.items():
        if name in given:
            os.environ[variable] = str(given[name])
    args.log_dir = given.get("logdir", args.log_dir)
