"""Jobs whose ranks are on several hosts (network namespaces, gossamer.netlab). Not a test file."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from gossamer import netlab
from tests import ROOT
from tests.support.forks import Script
from tests.support.started import Started, starting

End = tuple[int, str, str]


def partition_of(ranks_of: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, where host i has ranks_of[i], with consecutive numbers."""
    first = [sum(ranks_of[:host]) for host in range(len(ranks_of))]
    return [list(range(begin, begin + count)) for begin, count in zip(first, ranks_of, strict=True)]


def run_ranks(
    hosts: netlab.Hosts,
    ranks_of: Sequence[int],
    code: str,
    *,
    container: bool = False,
    timeout_s: float = 150,
) -> list[End]:
    """Runs `python -c code` as the ranks of a job. Returns (exit code, stdout, stderr) of each.

    Every process is told that all ranks are on its host, as a bare mpirun may do. The processes are forks, but in a
    container.
    """
    size = sum(ranks_of)
    argv = ["-c", code]
    with starting(sys.executable, ROOT) as start, ExitStack() as stack:
        processes: list[Script | Started] = []
        for rank, host in enumerate(host for host, ranks in enumerate(partition_of(ranks_of)) for _ in ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": hosts.address(0),
                "MASTER_PORT": "29431",
                "GLOO_SOCKET_IFNAME": netlab.DEVICE,
                "OMP_NUM_THREADS": "1",
            }
            if container:
                prefix = hosts.prefix(host, container=True)
                processes.append(start(argv, env=environment, prefix=prefix))
            else:
                script = Script(argv, environment, ROOT, network=hosts.namespace(host))
                processes.append(stack.enter_context(script))
        return [process.finish(timeout_s) for process in processes]


def printed(end: End) -> dict:
    """What a rank has printed as lines of JSON, as one dictionary."""
    _, out, _ = end
    found = {}
    for line in out.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found
