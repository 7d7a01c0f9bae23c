# Checks of a machine's resources: shared memory, cores and threads, open files. They are pure functions of the facts of
# all ranks. checks.py lists them.
"""What a host has for its workers."""

from collections.abc import Callable
from typing import Any

from gossamer.doctor.rows import ERROR, WARNING, Findings, Job, check

MIB, GIB = 1 << 20, 1 << 30
SMALL_SHM_BYTES = 64 * MIB  # Docker's default
LEAST_SHM_BYTES = 16 * MIB
FILES_AT_LEAST = 1024  # a process's own files
FILES_A_RANK = 8  # the connections of a few groups to each rank
MORE_SHM = "give it more: docker run --shm-size 2g (or --ipc host), or mount -o remount,size=2G /dev/shm"
SHM_USERS = 'DataLoader\'s workers and NCCL use it; the backend "gossamer" does not'


@check("shared memory")
def shared_memory(job: Job) -> Findings:
    """/dev/shm is there and has room, for the DataLoader's workers and for NCCL."""
    for host, own in job.of_hosts("shared_memory").items():
        if own is None:
            yield WARNING, f"{host}: no /dev/shm; {SHM_USERS}", "mount a tmpfs at /dev/shm"
        elif own["free"] < LEAST_SHM_BYTES:
            sizes = f"{own['free'] / MIB:.0f} MiB free of {own['bytes'] / MIB:.0f} MiB in /dev/shm"
            yield ERROR, f"{host}: {sizes}; {SHM_USERS}", f"delete what ended runs left there, or {MORE_SHM}"
        elif own["bytes"] <= SMALL_SHM_BYTES:
            yield WARNING, f"{host}: /dev/shm has {own['bytes'] / MIB:.0f} MiB; {SHM_USERS}", MORE_SHM
    return _of_all(job, "shared_memory", lambda own: own and f"{own['free'] / GIB:.1f} GiB free in /dev/shm")


@check("cores")
def cores(job: Job) -> Findings:
    """Each worker has a core; the threads of all fit into them, and do not leave them idle."""
    for host, own in job.of_hosts("cores").items():
        workers, threads, quota = len(job.hosts[host]), own["threads"], own["quota"]
        usable = own["usable"] if quota is None else min(own["usable"], max(1, round(quota)))
        there = f"{usable} cores" + ("" if quota is None else f" (the container's share is {quota:g})")
        fair = max(1, usable // workers)
        said = f"{host}: {workers} workers"
        if workers > usable:
            yield WARNING, f"{said} on {there}", f"start {usable} workers here, or expect them to take turns"
        elif threads * workers > usable:
            yield WARNING, f"{said} with {threads} threads each on {there}", f"set OMP_NUM_THREADS={fair}"
        elif threads == 1 and fair >= 4 and not job.of_hosts("cuda")[host]["available"]:
            advice = f"set OMP_NUM_THREADS={fair}; torchrun sets 1, gossamer run {fair}"
            yield WARNING, f"{said} with 1 thread each on {there}: most stay idle", advice
    return _of_all(job, "cores", lambda own: f"{own['usable']} cores, threads of a worker: {own['threads']}")


@check("open files")
def open_files(job: Job) -> Findings:
    """A worker may open a file for every connection to the others."""
    need = FILES_AT_LEAST + FILES_A_RANK * len(job.facts)
    for host, own in job.of_hosts("open_files").items():
        soft, hard = own["soft"], own["hard"]
        if 0 <= soft < need:
            enough = hard < 0 or hard >= need
            yield (
                ERROR if soft < need // 4 else WARNING,  # a group of few ranks connects with fewer
                f"{host}: a process may open {soft} files; {len(job.facts)} ranks may need {need}",
                "ulimit -n 65536 before the start" if enough else "raise nofile in /etc/security/limits.conf",
            )
    return _of_all(
        job, "open_files", lambda own: "unlimited" if own["soft"] < 0 else f"{own['soft']:,} a process"
    )


def _of_all(job: Job, name: str, text: Callable[[Any], str]) -> str:
    """Returns the fact of every host in words, or once if all hosts are alike."""
    said = {host: text(own) for host, own in job.of_hosts(name).items()}
    if len(set(said.values())) == 1:
        return next(iter(said.values())) + (" on every host" if len(said) > 1 else "")
    return "; ".join(f"{host}: {words}" for host, words in said.items())
