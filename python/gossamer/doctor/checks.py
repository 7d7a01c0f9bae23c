# The list of all checks of `gossamer doctor`, and how they run. A check that raises becomes an error row, and the
# others go on. A check is a function Job -> rows in software.py, machine.py, network.py, exposure.py or variables.py.
# cli.py calls run().
"""All checks."""

from collections.abc import Callable, Mapping

from gossamer.doctor import exposure, machine, network, software, variables
from gossamer.doctor.rows import ERROR, BrokenFactError, Job, Row

Check = Callable[[Job], list[Row]]

CHECKS: Mapping[str, Check] = {
    "group": network.meeting,
    "versions": software.versions,
    "extension": software.extension,
    "CUDA": software.cuda,
    "NCCL": software.nccl,
    "interface": network.interface,
    "public address": exposure.exposed,
    "same host": network.sharing,
    "levels": network.levels,
    "shared memory": machine.shared_memory,
    "cores": machine.cores,
    "open files": machine.open_files,
    "variables": variables.environment,
    "MTU": network.mtu,
    "clocks": network.clocks,
    "pair": network.pairs,
    "ssh": variables.ssh,
}


def run(job: Job, checks: Mapping[str, Check] = CHECKS) -> list[Row]:
    """Returns the rows of every check, in order."""
    rows: list[Row] = []
    for name, check in checks.items():
        try:
            rows += check(job)
        except BrokenFactError as error:
            advice = "the message is the system's; see what refuses it there"
            rows.append(Row(name, ERROR, str(error), advice))
        except Exception as error:
            said = f"the check itself failed: {type(error).__name__}: {error}"
            rows.append(Row(name, ERROR, said, "report this; the other checks are not affected"))
    return rows
