# Bagua's launchers, `python -m gossamer.bagua.distributed.run` and `.launch`, run `gossamer run`. Bagua's own flags are
# translated, refused, or printed as without effect. Others are torchrun's. Used by gossamer/bagua/distributed/.
"""Bagua's launchers."""

import argparse
import os
import sys
from collections.abc import Sequence

from gossamer.errors import ConfigError, GossamerError
from gossamer.launch import run

# Flags of Bagua's autotune service, which does not exist here. They change nothing that a script computes.
IDLE = (
    "bagua_service_port",
    "autotune_max_samples",
    "autotune_sampling_confidence_time",
    "autotune_warmup_time",
)
IDLE_SWITCHES = ("is_output_autotune_log", "report_metrics")
# Flags that a script may rely on, and what to do instead.
REFUSED = {
    "host_list": "start the same command on each host, with --nnodes, --rdzv_backend c10d and --rdzv_endpoint",
    "ssh_port": "start the same command on each host, with --nnodes, --rdzv_backend c10d and --rdzv_endpoint",
}
REFUSED_SWITCHES = {
    "enable_bagua_net": "NCCL's own transports are used; leave it out",
    "set_additional_flag": "read LOCAL_RANK in the script, or call bagua.get_local_rank()",
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
    for flag in (*IDLE, *IDLE_SWITCHES):
        switch = {"action": "store_true"} if flag in IDLE_SWITCHES else {"metavar": "X"}
        group.add_argument(f"--{flag}", default=None, help="no effect", **switch)  # type: ignore[arg-type]
    for flag, instead in (REFUSED | REFUSED_SWITCHES).items():
        switch = {"action": "store_true"} if flag in REFUSED_SWITCHES else {"metavar": "X"}
        group.add_argument(f"--{flag}", default=None, help=f"refused: {instead}", **switch)  # type: ignore[arg-type]
    return parser


def translate(args: argparse.Namespace) -> None:
    """Puts Bagua's flags into effect, and removes them from ``args``.

    Raises:
        ConfigError: a flag is not supported, or the bucket size is below 1.
    """
    for flag, instead in (REFUSED | REFUSED_SWITCHES).items():
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag} is not supported; {instead}")
    if args.autotune_level is not None:
        if args.autotune_level < 0:
            raise ConfigError(f"--autotune_level must be at least 0, got {args.autotune_level}")
        os.environ["BAGUA_AUTOTUNE"] = str(args.autotune_level)
    if idle := [f"--{flag}" for flag in (*IDLE, *IDLE_SWITCHES) if getattr(args, flag) is not None]:
        print(f"bagua: no effect, as there is no autotune service: {', '.join(idle)}", file=sys.stderr)
    if args.default_bucket_size is not None:
        if args.default_bucket_size < 1:
            raise ConfigError(
                f"--default_bucket_size must be at least 1 byte, got {args.default_bucket_size}"
            )
        os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(args.default_bucket_size)
    if args.logdir is not None:
        args.log_dir = args.logdir
    own = (
        *IDLE,
        *IDLE_SWITCHES,
        *REFUSED,
        *REFUSED_SWITCHES,
        "autotune_level",
        "default_bucket_size",
        "logdir",
    )
    for flag in own:
        delattr(args, flag)
