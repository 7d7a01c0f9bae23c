# Checks of a machine's resources: shared memory, cores and threads, open files. They are pure functions of the facts of
# all ranks. checks.py lists them.
"""What a host has for its workers."""

from collections.abc import Callable, Mapping
from typing import Any

from gossamer.doctor.rows import ERROR, OK, WARNING, Job, Row

MIB, GIB = 1 << 20, 1 << 30
SMALL_SHM_BYTES = 64 * MIB  # Docker's default
LEAST_SHM_BYTES = 16 * MIB
FILES_AT_LEAST, FILES_A_RANK = (
    1024,
    8,
)  # a process's own files, and the connections of a few groups to each rank


def shared_memory(job: Job) -> list[Row]:
    """/dev/shm is there and has room, for the DataLoader's workers and for NCCL."""
    rows = []
    for host, own in job.of_hosts("shared_memory").items():
        advice = (
            "give it more: docker run --shm-size 2g (or --ipc host), or mount -o remount,size=2G /dev/shm"
        )
        who = 'DataLoader\'s workers and NCCL use it; the backend "gossamer" does not'
        if own is None:
            rows.append(
                Row("shared memory", WARNING, f"{host}: no /dev/shm; {who}", "mount a tmpfs at /dev/shm")
            )
        elif own["free"] < LEAST_SHM_BYTES:
            said = (
                f"{host}: {own['free'] / MIB:.0f} MiB free of {own['bytes'] / MIB:.0f} MiB in /dev/shm; {who}"
            )
            rows.append(Row("shared memory", ERROR, said, f"delete what ended runs left there, or {advice}"))
        elif own["bytes"] <= SMALL_SHM_BYTES:
            said = f"{host}: /dev/shm has {own['bytes'] / MIB:.0f} MiB; {who}"
            rows.append(Row("shared memory", WARNING, said, advice))
    return rows or _fine("shared memory", job, "shared_memory", _free)


def cores(job: Job) -> list[Row]:
    """Each worker has a core; the threads of all fit into them, and do not leave them idle."""
    rows = []
    for host, own in job.of_hosts("cores").items():
        local = len(job.hosts[host])
        usable = own["usable"] if own["quota"] is None else min(own["usable"], max(1, round(own["quota"])))
        limit = "" if own["quota"] is None else f" (the container's share is {own['quota']:g})"
        fair = max(1, usable // local)
        gpus = job.of_hosts("cuda")[host]["available"]
        if local > usable:
            said = f"{host}: {local} workers on {usable} cores{limit}"
            rows.append(
                Row("cores", WARNING, said, f"start {usable} workers here, or expect them to take turns")
            )
        elif own["threads"] * local > usable:
            said = f"{host}: {local} workers with {own['threads']} threads each on {usable} cores{limit}"
            rows.append(Row("cores", WARNING, said, f"set OMP_NUM_THREADS={fair}"))
        elif own["threads"] == 1 and fair >= 4 and not gpus:
            said = f"{host}: {local} workers with 1 thread each on {usable} cores{limit}: most stay idle"
            advice = f"set OMP_NUM_THREADS={fair}; torchrun sets 1, gossamer run {fair}"
            rows.append(Row("cores", WARNING, said, advice))
    return rows or _fine("cores", job, "cores", _threads)


def open_files(job: Job) -> list[Row]:
    """A worker may open a file for every connection to the others."""
    rows, need = [], FILES_AT_LEAST + FILES_A_RANK * len(job.facts)
    for host, own in job.of_hosts("open_files").items():
        if 0 <= own["soft"] < need:
            said = f"{host}: a process may open {own['soft']} files; {len(job.facts)} ranks may need {need}"
            enough = own["hard"] < 0 or own["hard"] >= need
            advice = (
                "ulimit -n 65536 before the start" if enough else "raise nofile in /etc/security/limits.conf"
            )
            # A group of few ranks connects with fewer.
            rows.append(Row("open files", ERROR if own["soft"] < need // 4 else WARNING, said, advice))
    return rows or _fine("open files", job, "open_files", _limit)


def _fine(check: str, job: Job, name: str, text: Callable[[Any], str]) -> list[Row]:
    """Returns an ok row with the fact of every host in words, or once if all hosts are alike."""
    said = {host: text(own) for host, own in job.of_hosts(name).items()}
    if len(set(said.values())) == 1:
        every = " on every host" if len(said) > 1 else ""
        return [Row(check, OK, next(iter(said.values())) + every)]
    return [Row(check, OK, "; ".join(f"{host}: {words}" for host, words in said.items()))]


def _free(own: Mapping[str, int]) -> str:
    return f"{own['free'] / GIB:.1f} GiB free in /dev/shm"


def _threads(own: Mapping[str, Any]) -> str:
    return f"{own['usable']} cores, threads of a worker: {own['threads']}"


def _limit(own: Mapping[str, int]) -> str:
    return "unlimited" if own["soft"] < 0 else f"{own['soft']:,} a process"
