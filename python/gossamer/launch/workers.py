# Calls a function of this package on the workers of a job: of the job that this process belongs to, or of a job that is
# started for it. So `gossamer bench` and `gossamer doctor` work under torchrun as well as alone. The function joins a
# group itself if it needs one. function.py starts the workers and collects the results.
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
    """Returns what ``call(settings)`` has returned on rank 0, or None on the other ranks of a job.

    ``call`` must be a function of a module. ``nproc`` and ``hosts`` are -np and -H, and start workers. Without them
    and without a job, ``alone`` workers are started; if that is None, the function is called in this process.

    Raises:
        ConfigError: -np or -H is given inside a job, or -np is not positive.
        CommError: a worker was lost. The first exception of ``call`` on any rank is raised as it is.
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
