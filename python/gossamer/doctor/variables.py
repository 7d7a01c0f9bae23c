# Checks of environment variables (unknown, contradictory, different between ranks) and of ssh. They are pure
# functions of the facts of all ranks. checks.py lists them.
"""The environment of the ranks."""

import difflib
from dataclasses import fields

from gossamer.config import BUILD_VARIABLES, ELASTIC_VARIABLES, Config
from gossamer.doctor.rows import ERROR, OK, WARNING, Finding, Findings, Job, Row, check, differing

KNOWN = (
    *(f"GOSSAMER_{field.name.upper()}" for field in fields(Config)),
    *BUILD_VARIABLES,
    *ELASTIC_VARIABLES,
)
# The variables that Gloo, and torch's wrapper of it, read.
GLOO = (
    "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_PATH",
    "GLOO_DISABLE_CONNECTION_RETRIES",
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER",
    "GLOO_ENABLE_STORE_V2_API",
    "GLOO_LOG_LEVEL",
)
# Variables that must be equal on all ranks if they are set. Others may differ, such as names of network devices.
SHARED = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GLOO_DEVICE_TRANSPORT")
SHARED_PREFIXES = ("GOSSAMER_", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_DISABLE", "TORCH_GLOO_")
PLACES = {  # the variables of rank and size, by launcher
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Horovod": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
}


@check("variables")
def unknown(job: Job) -> Findings:
    """Every GOSSAMER_* and GLOO_* variable is one that is read, and no value is refused."""
    found: dict[str, Finding] = {}
    for own in job.of_ranks("environment"):
        for name in own:
            known = KNOWN if name.startswith("GOSSAMER_") else GLOO if name.startswith("GLOO_") else None
            if known is None or name in known:
                continue
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}?" if near else f"unset it; known are {', '.join(known)}"
            status = ERROR if known is KNOWN else WARNING
            found[name] = status, f"{name}={own[name]}: nothing reads a variable of this name", advice
    for refused in job.of_ranks("refused_settings"):
        if refused is not None and "unknown variable" not in refused:  # those are named above
            found[refused] = ERROR, refused, "set it to such a value, or unset it"
    yield from found.values()
    return ""


@check("variables")
def contradictory(job: Job) -> Findings:
    """The variables of launchers agree with each other and between ranks, and so do those of Gloo and NCCL."""
    found: dict[str, Finding] = {}
    every = job.of_ranks("environment")
    for rank, own in enumerate(every):
        told = {
            launcher: tuple(own[name] for name in names)
            for launcher, names in PLACES.items()
            if all(name in own for name in names)
        }
        if len(set(told.values())) > 1:
            listing = ", ".join(f"{launcher}: {place[0]} of {place[1]}" for launcher, place in told.items())
            advice = "unset the variables of the launcher that did not start this run; Gossamer takes torchrun's first"
            found["place"] = ERROR, f"rank {rank} has several places: {listing}", advice
        gloo, nccl = own.get("GLOO_SOCKET_IFNAME"), own.get("NCCL_SOCKET_IFNAME")
        chosen = gloo and nccl and not nccl.startswith("^")
        if chosen and gloo.split(",")[0] not in nccl.lstrip("=").split(","):
            names = f"GLOO_SOCKET_IFNAME={gloo} and NCCL_SOCKET_IFNAME={nccl} name different devices"
            advice = "set both to one, or run with --network-interfaces"
            found["device"] = WARNING, f"rank {rank}: {names}", advice
        if len(job.hosts) > 1 and own.get("MASTER_ADDR", "").startswith(("127.", "localhost", "::1")):
            said = f"rank {rank}: MASTER_ADDR={own['MASTER_ADDR']} with {len(job.hosts)} hosts"
            found["master"] = ERROR, said, "set it to rank 0's address, by which the others reach it"
    yield from found.values()
    shared = {name for own in every for name in own if name in SHARED or name.startswith(SHARED_PREFIXES)}
    for name in sorted(shared - set(ELASTIC_VARIABLES)):
        values = [own.get(name, "not set") for own in every]
        yield from differing(values, name, "set it alike on all ranks: gossamer run -x")
    return ""


def environment(job: Job) -> list[Row]:
    """Runs unknown() and contradictory(), or lists what is set if nothing is wrong."""
    if rows := unknown(job) + contradictory(job):
        return rows
    first = job.of_ranks("environment")[0]
    named = sorted(name for name in first if name.startswith(("GOSSAMER_", "GLOO_", "NCCL_", "OMP_")))
    return [Row("variables", OK, ", ".join(f"{name}={first[name]}" for name in named) or "none is set")]


@check("ssh")
def ssh(job: Job) -> Findings:
    """The ssh client is there, with which `gossamer run -H` starts other hosts."""
    if (path := job.of_ranks("ssh")[0]) is None:
        advice = "install openssh-client, or start on each host with gossamer run --nnodes"
        yield WARNING, "no ssh on PATH of rank 0's host; gossamer run -H needs it", advice
    return str(path)
