# Checks of what is installed: versions, the native extension, CUDA, NCCL. They are pure functions of the facts of all
# ranks. checks.py lists them.
"""What is installed on the ranks."""

from gossamer.doctor.rows import ERROR, OK, WARNING, Job, Row, differing


def versions(job: Job) -> list[Row]:
    """Python (to its minor version), torch and Gossamer are the same on all ranks."""
    every = job.of_ranks("versions")
    rows = []
    for name in ("torch", "gossamer"):
        advice = f"install the same {name} on all hosts, and build Gossamer against it there"
        rows += differing("versions", [own[name] for own in every], name, advice)
    minors = [".".join(own["python"].split(".")[:2]) for own in every]
    rows += differing("versions", minors, "Python", "use one version of Python on all hosts")
    own = every[0]
    said = f"Python {own['python']}, torch {own['torch']}, Gossamer {own['gossamer']}"
    return rows or [Row("versions", OK, f"{said} on {_ranks(job)}")]


def extension(job: Job) -> list[Row]:
    """The native extension computes on every rank, and knows CUDA where torch sees a GPU."""
    rows = []
    for rank, (own, gpu) in enumerate(zip(job.of_ranks("extension"), job.of_ranks("cuda"), strict=True)):
        if not own["works"]:
            advice = "build Gossamer against the torch that is installed: pip install --no-build-isolation ."
            said = f"rank {rank}: {own['file']} does not give back what it encoded"
            rows.append(Row("extension", ERROR, said, advice))
        if gpu["available"] and not own["cuda"]:
            advice = "build Gossamer where nvcc is on PATH, with GOSSAMER_BUILD_CUDA=1; or train on the CPU"
            said = f"rank {rank}: torch sees a GPU, and {own['file']} was built without CUDA"
            rows.append(Row("extension", ERROR, said, advice))
    sets = sorted({own["instruction_set"] for own in job.of_ranks("extension")})
    kind = "with CUDA" if all(own["cuda"] for own in job.of_ranks("extension")) else "for CPUs"
    said = f"loaded and computes, {kind}, {' and '.join(sets)}, on {_ranks(job)}"
    return rows or [Row("extension", OK, said)]


def cuda(job: Job) -> list[Row]:
    """torch sees a GPU if a driver is loaded. Hosts have a GPU for each of their ranks, or all have none."""
    rows, found = [], job.of_hosts("cuda")
    for host, own in found.items():
        count, local = len(own["devices"]), len(job.hosts[host])
        if own["driver"] and not own["available"]:
            built = f"for CUDA {own['built_for']}" if own["built_for"] else "without CUDA"
            advice = "install a torch for a CUDA that this driver knows; see CUDA_VISIBLE_DEVICES too"
            said = f"{host}: NVIDIA driver {own['driver']}, but torch, built {built}, sees no GPU"
            rows.append(Row("CUDA", WARNING, said, advice))
        elif 0 < count < local:
            advice = f"start {count} workers on this host, or use gossamer.init(backend='gloo') on the CPU"
            rows.append(Row("CUDA", ERROR, f"{host}: {count} GPUs for {local} workers", advice))
    counts = {host: len(own["devices"]) for host, own in found.items()}
    if len({bool(count) for count in counts.values()}) > 1:
        listing = ", ".join(f"{host} {count}" for host, count in counts.items())
        rows.append(Row("CUDA", ERROR, f"GPUs on some hosts only: {listing}", "leave out the hosts without, or hide "
                        "all GPUs with CUDA_VISIBLE_DEVICES="))  # fmt: skip
    kinds = sorted({name for own in found.values() for name in own["devices"]})
    said = "no GPU: workers train on the CPU"
    if kinds:
        first = next(iter(found.values()))
        said = f"{', '.join(kinds)}; {sum(counts.values())} in all; CUDA {first['built_for']}, driver {first['driver']}"
    return rows or [Row("CUDA", OK, said)]


def nccl(job: Job) -> list[Row]:
    """If there are GPUs, all ranks have NCCL in one version."""
    if not any(own["available"] for own in job.of_ranks("cuda")):
        return [Row("NCCL", OK, "not needed: no GPU")]
    every = job.of_ranks("nccl")
    if missing := [rank for rank, own in enumerate(every) if not own["available"]]:
        advice = "install a torch for CUDA, which brings NCCL"
        return [Row("NCCL", ERROR, f"torch of rank {missing[0]} was built without NCCL", advice)]
    rows = differing("NCCL", [own["version"] for own in every], "NCCL", "install the same torch on all hosts")
    return rows or [Row("NCCL", OK, f"version {every[0]['version']}")]


def _ranks(job: Job) -> str:
    count, hosts = len(job.facts), len(job.hosts)
    if count == 1:
        return "this machine"
    return f"{count} ranks on {hosts} host{'s' if hosts > 1 else ''}"
