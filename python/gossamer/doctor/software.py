# Checks of what is installed: versions, the native extension, CUDA, NCCL. They are pure functions of the facts of all
# ranks. checks.py lists them.
"""What is installed on the ranks."""

from gossamer.doctor.rows import ERROR, WARNING, Findings, Job, check, differing, how_many


@check("versions")
def versions(job: Job) -> Findings:
    """Python (to its minor version), torch and Gossamer are the same on all ranks."""
    every = job.of_ranks("versions")
    for name in ("torch", "gossamer"):
        advice = f"install the same {name} on all hosts, and build Gossamer against it there"
        yield from differing([own[name] for own in every], name, advice)
    minors = [".".join(own["python"].split(".")[:2]) for own in every]
    yield from differing(minors, "Python", "use one version of Python on all hosts")
    said = "Python {python}, torch {torch}, Gossamer {gossamer}".format(**every[0])
    return f"{said} on {_ranks(job)}"


@check("extension")
def extension(job: Job) -> Findings:
    """The native extension computes on every rank, and knows CUDA where torch sees a GPU."""
    every = job.of_ranks("extension")
    for rank, (own, gpu) in enumerate(zip(every, job.of_ranks("cuda"), strict=True)):
        if not own["works"]:
            advice = "build Gossamer against the torch that is installed: pip install --no-build-isolation ."
            yield ERROR, f"rank {rank}: {own['file']} does not give back what it encoded", advice
        if gpu["available"] and not own["cuda"]:
            said = f"rank {rank}: torch sees a GPU, and {own['file']} has no CUDA kernels"
            advice = (
                "install the wheel gossamer-cuda13 of Gossamer's version, or build Gossamer where nvcc is on PATH, "
                "with GOSSAMER_BUILD_CUDA=1; or train on the CPU"
            )
            yield ERROR, said, advice
    sets = " and ".join(sorted({own["instruction_set"] for own in every}))
    kind = "with CUDA" if all(own["cuda"] for own in every) else "for CPUs"
    return f"loaded and computes, {kind}, {sets}, on {_ranks(job)}"


@check("CUDA")
def cuda(job: Job) -> Findings:
    """torch sees a GPU if a driver is loaded. Hosts have a GPU for each of their ranks, or all have none."""
    found = job.of_hosts("cuda")
    for host, own in found.items():
        count, local = len(own["devices"]), len(job.hosts[host])
        if own["driver"] and not own["available"]:
            built = f"for CUDA {own['built_for']}" if own["built_for"] else "without CUDA"
            said = f"{host}: NVIDIA driver {own['driver']}, but torch, built {built}, sees no GPU"
            yield (
                WARNING,
                said,
                "install a torch for a CUDA that this driver knows; see CUDA_VISIBLE_DEVICES too",
            )
        elif 0 < count < local:
            advice = f"start {count} workers on this host, or use gossamer.init(backend='gloo') on the CPU"
            yield ERROR, f"{host}: {count} GPUs for {local} workers", advice
    counts = {host: len(own["devices"]) for host, own in found.items()}
    if any(counts.values()) and not all(counts.values()):
        listing = ", ".join(f"{host} {count}" for host, count in counts.items())
        advice = "leave out the hosts without, or hide all GPUs with CUDA_VISIBLE_DEVICES="
        yield ERROR, f"GPUs on some hosts only: {listing}", advice
    kinds = sorted({name for own in found.values() for name in own["devices"]})
    if not kinds:
        return "no GPU: workers train on the CPU"
    first = next(iter(found.values()))
    software = f"CUDA {first['built_for']}, driver {first['driver']}"
    return f"{', '.join(kinds)}; {sum(counts.values())} in all; {software}"


@check("NCCL")
def nccl(job: Job) -> Findings:
    """If there are GPUs, all ranks have NCCL in one version."""
    if not any(own["available"] for own in job.of_ranks("cuda")):
        return "not needed: no GPU"
    every = job.of_ranks("nccl")
    if missing := [rank for rank, own in enumerate(every) if not own["available"]]:
        advice = "install a torch for CUDA, which brings NCCL"
        yield ERROR, f"torch of rank {missing[0]} was built without NCCL", advice
    else:
        yield from differing([own["version"] for own in every], "NCCL", "install the same torch on all hosts")
    return f"version {every[0]['version']}"


def _ranks(job: Job) -> str:
    return "this machine" if len(job.facts) == 1 else how_many(job)
