"""The time of an all_reduce of float32 on one host: ours, Gloo, Open MPI and the raw limit of shared memory.

Processes of all contenders live through the run and take turns at every size; those without a turn sleep on a socket.
A figure is the median over batches of calls, each as long as on its slowest rank; ratios are medians over the turns.
Every contender's sum is checked at every size. "symmetric" is a tensor of torch's symmetric memory, which our backend
reduces in place. The raw limit is bench_shm_raw_native.cpp: C++ without any call from Python. So ours is given gross,
and net of a call on one element in a group of one rank, made by as many processes at once. No rank writes a tensor
between calls, so a slice stays in the cache of the core that sums it. This flatters the raw limit and ours in place,
more than training would. A contender that this machine lacks is named in `left_out` and on stderr.
"""

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fleet import Turn, serve, started
from harness import FOLDER, WORKER_TIMEOUT_S, arguments, paired, report_against, spread

import gossamer as gs
from gossamer.bench.measuring import KIB, MIB, label

SIZES = tuple(4 * KIB << 2 * i for i in range(8))
PLAIN, SYMMETRIC, CALL, GLOO, MPI, RAW = "plain", "symmetric", "call", "Gloo", "Open MPI", "raw limit"
COLOURS = {PLAIN: "tab:blue", SYMMETRIC: "tab:green", GLOO: "tab:red", MPI: "tab:orange", RAW: "black"}
GLOO_TARGETS = {  # how many times as fast, with 2 ranks
    PLAIN: {64 * KIB: 15.0, MIB: 12.0, 64 * MIB: 5.0},
    SYMMETRIC: {MIB: 40.0, 64 * MIB: 9.0},
}
MPI_TARGET, RAW_TARGET, JUDGED_FROM = 1.0, 1.3, 64 * KIB
Times = dict[str, list[float]]  # contender: microseconds, a figure for each turn

# ---- what a rank does


def checked(values: Any, call: Callable[[], object], *, ranks: range, rank: int) -> Callable[[], object]:
    """`call`, after a check of its sum over `ranks` in `values` (a NumPy array); leaves zeros for the timing."""
    pattern = torch.arange(len(values)) % 251
    values[:] = (pattern + rank).numpy()  # small integers: no order of adding rounds
    call()
    wanted = (pattern * len(ranks) + sum(ranks)).numpy()
    if wrong := int((values != wanted).sum()):
        raise ArithmeticError(f"rank {rank}: {wrong} of {len(values)} sums are wrong")
    values.fill(0)
    return call


def torch_rank(job: dict) -> None:
    """One rank: of Gloo's default group, of a group of our backend, and alone in another group of our backend."""
    gs.init(backend="gloo")
    rank, ours = dist.get_rank(), dist.new_group(backend=job["backend"])
    alone, _ = dist.new_subgroups(1, backend=job["backend"])
    groups = {PLAIN: ours, SYMMETRIC: ours, CALL: alone, GLOO: dist.group.WORLD}

    def prepare(contender: str, nbytes: int) -> Callable[[], object]:
        group = groups[contender]
        shared = contender in (SYMMETRIC, CALL)
        tensor = symmetric_tensor(nbytes // 4, group) if shared else torch.empty(nbytes // 4)
        ranks = range(rank, rank + 1) if contender == CALL else range(dist.get_world_size())
        return checked(tensor.numpy(), lambda: dist.all_reduce(tensor, group=group), ranks=ranks, rank=rank)

    serve(job, rank, prepare, dist.barrier)
    gs.shutdown()


def symmetric_tensor(numel: int, group: Any) -> torch.Tensor:
    from torch.distributed import _symmetric_memory as symmetric_memory

    tensor = symmetric_memory.empty(numel, dtype=torch.float32, device="cpu")
    symmetric_memory.rendezvous(tensor, group.group_name)
    return tensor


def mpi_rank(job: dict) -> None:
    from mpi4py import MPI as mpi

    world = mpi.COMM_WORLD

    def prepare(_: str, nbytes: int) -> Callable[[], object]:
        array = torch.empty(nbytes // 4).numpy()
        call = partial(world.Allreduce, mpi.IN_PLACE, [array, mpi.FLOAT])
        return checked(array, call, ranks=range(world.size), rank=world.rank)

    serve(job, world.rank, prepare, world.Barrier)


# ---- the parent: who takes part, and whose turn it is


def raw_turn(program: Path, size: int, _: str, nbytes: int, *, batches: int, calls: int) -> list[float]:
    command = [str(program), *map(str, (size, nbytes, batches, calls))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WORKER_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)["seconds"]


def absent(backend: str, program: Path) -> dict[str, str]:
    """Compiles the raw limit to `program`. Returns the contenders that cannot take part here, and why."""
    why: dict[str, str] = {}
    if backend != "gossamer":
        why |= dict.fromkeys((SYMMETRIC, CALL), f"{backend} stands in for our backend")
    source = FOLDER / "bench_shm_raw_native.cpp"
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        why[RAW] = "the processor has no AVX2"
    elif shutil.which("g++") is None:
        why[RAW] = "no g++"
    else:  # the source sets -mavx2 for its kernel alone
        subprocess.run(["g++", "-std=c++17", "-O3", str(source), "-o", str(program)], check=True)
    if importlib.util.find_spec("mpi4py") is None:
        why[MPI] = "no mpi4py"
    elif shutil.which("mpirun") is None:
        why[MPI] = "no mpirun"
    else:
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
        why |= {} if "Open MPI" in version else {MPI: "mpirun is not Open MPI's"}
    for contender, reason in why.items():
        print(f"bench_allreduce: no {contender}: {reason}", file=sys.stderr)
    return why


def in_turns(turns: dict[str, Turn], nbytes: int, *, rounds: int, turn_s: float) -> Times:
    """Microseconds a call of each contender, a figure for each round; about `turn_s` a turn."""
    times: Times = {name: [] for name in turns}
    shape: dict[str, dict[str, int]] = {}
    for name, turn in turns.items():
        calls = 2
        for _ in range(2):  # the first calls are slow: they would have too few in a turn
            call_s = statistics.median(turn(name, bytes_of(name, nbytes), batches=1, calls=calls))
            calls = max(2, int(turn_s / 5 / call_s))
        total = max(3, int(turn_s / call_s))
        shape[name] = {"batches": min(10, total), "calls": max(1, total // 10)}
    names = list(turns)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = turns[name](name, bytes_of(name, nbytes), **shape[name])
            times[name].append(1e6 * statistics.median(seconds))
    return times


def bytes_of(contender: str, nbytes: int) -> int:
    return 4 if contender == CALL else nbytes


@contextmanager
def contenders(size: int, backend: str, missing: dict[str, str], folder: Path) -> Iterator[dict[str, Turn]]:
    """All contenders that take part with `size` ranks, each with the function that lets it take a turn."""
    launcher = [sys.executable, *f"-m torch.distributed.run --standalone --nproc-per-node {size}".split()]
    with started(launcher, size, {"as": "torch", "backend": backend}, folder) as torch_turn:
        turns = dict.fromkeys((PLAIN, SYMMETRIC, CALL, GLOO), torch_turn)
        turns[RAW] = partial(raw_turn, folder / "raw", size)
        turns = {name: turn for name, turn in turns.items() if name not in missing}
        if MPI in missing:
            yield turns
            return
        launcher = [*f"mpirun --allow-run-as-root --oversubscribe -n {size}".split(), sys.executable]
        with started(launcher, size, {"as": "mpi"}, folder) as mpi_turn:
            yield turns | {MPI: mpi_turn}


# ---- what comes of it


def show(times: Times, *, size: int, nbytes: int, left_out: dict[str, str]) -> None:
    def line(ours: str, peer: str, *, net: bool = False, **target: float | None) -> None:
        if not {ours, peer} <= times.keys():
            return
        calls = times[CALL] if net else [0.0] * len(times[ours])
        samples = [gross - call for gross, call in zip(times[ours], calls, strict=True)]
        slower = peer == RAW
        ratios = paired(samples, times[peer]) if slower else paired(times[peer], samples)
        report_against(
            f"all_reduce, {label(nbytes)}, {size} ranks, {ours}{' net of the call' if net else ''}",
            samples,
            "us",
            (peer, times[peer]),
            ratios,
            **target,
            ratio_is=f"{ours} / {peer}" if slower else f"{peer} / {ours}",
            baseline_spread=round(spread(times[peer]), 3),
            left_out=left_out,
            **({"call_us": round(statistics.median(calls), 3)} if net else {}),
        )

    judged = nbytes >= JUDGED_FROM
    for ours in (PLAIN, SYMMETRIC):
        line(ours, GLOO, at_least=GLOO_TARGETS[ours].get(nbytes) if size == 2 else None)
    line(PLAIN, MPI, at_least=MPI_TARGET if judged else None)
    line(PLAIN, RAW)
    line(SYMMETRIC, RAW)
    line(SYMMETRIC, RAW, net=True, at_most=RAW_TARGET if judged else None)


def draw(measured: dict[int, dict[int, Times]], file: Path) -> None:
    """A panel for each number of ranks, the median time of every contender over the size of the tensor."""
    if importlib.util.find_spec("matplotlib") is None:
        print("bench_allreduce: no plot: no matplotlib", file=sys.stderr)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(measured), 4.5), layout="constrained")
    panels = figure.subplots(1, len(measured), squeeze=False, sharey=True)[0]
    for panel, (size, by_bytes) in zip(panels, measured.items(), strict=True):
        for name, colour in COLOURS.items():
            known = {nbytes: statistics.median(t[name]) for nbytes, t in by_bytes.items() if name in t}
            if known:
                panel.plot(list(known), list(known.values()), marker="o", color=colour, label=name)
        panel.set(xscale="log", yscale="log", xlabel="float32 tensor", title=f"all_reduce, {size} ranks")
        panel.set_xticks(list(by_bytes), [label(nbytes) for nbytes in by_bytes], rotation=45)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0].set_ylabel("time of a call, us")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def main() -> None:
    options = arguments(
        __doc__,
        backend=("gossamer", "the torch.distributed backend that is ours"),
        plot=("build/benchmarks/allreduce.png", "where the plot goes"),
    )
    if options.worker:
        job = json.loads(options.worker)
        {"torch": torch_rank, "mpi": mpi_rank}[job["as"]](job)
        return
    sizes, ranks = (SIZES[:5:2], (2,)) if options.quick else (SIZES, (2, 4))
    rounds, turn_s = (2, 0.02) if options.quick else (9, 0.08)
    measured: dict[int, dict[int, Times]] = {size: {} for size in ranks}
    with tempfile.TemporaryDirectory(prefix="gossamer-allreduce-") as folder:
        missing = absent(options.backend, Path(folder) / "raw")
        for size in ranks:
            with contenders(size, options.backend, missing, Path(folder)) as turns:
                for nbytes in sizes:
                    measured[size][nbytes] = in_turns(turns, nbytes, rounds=rounds, turn_s=turn_s)
                    show(measured[size][nbytes], size=size, nbytes=nbytes, left_out=missing)
    draw(measured, Path(options.plot))


if __name__ == "__main__":
    main()
