# A function of this package on the workers of a job: of the job that this process is part of, or of one that is started
# for it. So `gossamer bench` and `gossamer doctor` work under torchrun as well as alone. It joins no group: that is the
# function's affair. Starting and collecting are function.py's.
"""Commands that run alone or inside a job."""

import argparse
from collections.abc import Callable
from typing import Any

from gossamer import config
from gossamer.errors import ConfigError
from gossamer.launch import function
from gossamer.launch import hosts as host_lists


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """-np and -H, as `gossamer run` has them."""
    parser.add_argument("-np", "--nproc", type=int, metavar="N", help="workers to start; not inside a job")
    parser.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="on these hosts, reached over ssh; -np defaults to all slots",
    )


def on_workers(
    call: Callable[[dict[str, Any]], Any],
    settings: dict[str, Any],
    *,
    nproc: int | None,
    hosts: str | None,
    alone: int | None = None,
) -> Any:
    """What ``call(settings)`` returned on rank 0; None on the other ranks of the job that this process is part of.

    ``call`` must be a function of a module. ``nproc`` and ``hosts`` are -np and -H, and start workers; without them
    and without a job ``alone`` workers are started, or it is called here, as the only rank.

    Raises:
        ConfigError: -np or -H inside a job, -np that is no positive number.
        CommError: a worker was lost; and whatever ``call`` raised first on some rank.
    """
    placement = config.launcher_environment()
    if placement is not None:
        if nproc is not None or hosts is not None:
            raise ConfigError(
                f"-np and -H start workers, and this is rank {placement.rank} of {placement.size} already, which "
                f"{placement.source} started; leave them out, got -np {nproc} and -H {hosts}"
            )
        answer = call(settings)
        return answer if placement.rank == 0 else None
    if nproc is None and hosts is None:
        nproc = alone
    if nproc is not None and nproc < 1:
        raise ConfigError(f"-np must be at least 1, got {nproc}")
    if nproc is None and hosts is None:
        return call(settings)
    size = nproc or sum(host.slots for host in host_lists.parse_hosts(hosts or ""))
    return function.run(call, (settings,), num_proc=size, hosts=hosts)[0]
