"""The other collectives of our torch.distributed backend on one host, against Gloo's: float32, in turns.

Both backends are groups of the same processes. The size stated is that of the larger tensor: the output of
all_gather, the input of reduce_scatter, either of broadcast and all_to_all. A figure is the median of batches
of calls, on the slowest rank, so a root that runs ahead of its receivers gains nothing. Results are checked.
`copy_ms` is a copy of a tensor of that size by every rank at once, with nothing exchanged: what memory allows.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, as_one, interleaved, paired, report_against, run_processes, serve, slowest

MIB = 1 << 20
OURS, GLOO, COPY = "ours", "Gloo", "copy"
TARGET = 5.0  # times as fast as Gloo, with 2 ranks
OPERATIONS = ("broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def pattern(rank: int, numel: int) -> torch.Tensor:
    """Small integers that tell ranks and places apart: sums of them are exact."""
    return (torch.arange(numel) % 251 + 1000 * rank).float()


def prepared(operation: str, numel: int, group: Any) -> Callable[[], object]:
    """The call on tensors of its own, the larger of `numel` elements, after a check of its result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part, own = numel // size, slice(rank * (numel // size), (rank + 1) * (numel // size))
    whole = [pattern(of, numel) for of in range(size)]
    if operation == "broadcast":
        out = whole[rank].clone()
        wanted, call = whole[0], partial(dist.broadcast, out, src=0, group=group)
    elif operation == "all_gather_into_tensor":
        out, source = torch.zeros(numel), pattern(rank, part)
        wanted = torch.cat([pattern(of, part) for of in range(size)])
        call = partial(dist.all_gather_into_tensor, out, source, group=group)
    elif operation == "reduce_scatter_tensor":
        out, wanted = torch.zeros(part), torch.stack(whole).sum(0)[own]
        call = partial(dist.reduce_scatter_tensor, out, whole[rank].clone(), group=group)
    else:
        out, wanted = torch.zeros(numel), torch.cat([values[own] for values in whole])
        call = partial(dist.all_to_all_single, out, whole[rank].clone(), group=group)
    call()
    if not torch.equal(out, wanted):
        raise ArithmeticError(f"rank {rank}: {operation} of {numel} elements: the result is wrong")
    return call


def worker(*, backend: str, mib: list[int], quick: bool) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a call by "operation MiB" and contender, a figure for each turn."""
    groups = {OURS: dist.new_group(backend=backend), GLOO: dist.group.WORLD}
    rounds, repeats = (2, 1) if quick else (9, 5)
    times = {}
    for operation in OPERATIONS:
        for size_mib in mib:
            calls, numel = 2 if quick else max(1, 8 // size_mib), size_mib * MIB // 4
            bodies = {
                name: as_one(prepared(operation, numel, group), calls, "cpu")
                for name, group in groups.items()
            }
            bodies[COPY] = as_one(partial(torch.zeros(numel).copy_, torch.ones(numel)), calls, "cpu")
            turns = slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))
            times[f"{operation} {size_mib}"] = {
                name: [1e3 * s / calls for s in each] for name, each in turns.items()
            }
    return times


def main() -> None:
    options = arguments(__doc__, backend=("gossamer", "the torch.distributed backend that is ours"))
    if serve(options, worker):
        return
    mib, sizes = ([1], (2,)) if options.quick else ([1, 16], (2, 4))
    for size in sizes:
        times = run_processes(size, {"backend": options.backend, "mib": mib, "quick": options.quick})
        for what, each in times.items():
            report_against(
                f"{what} MiB, {size} ranks",
                each[OURS],
                "ms",
                (GLOO, each[GLOO]),
                paired(each[GLOO], each[OURS]),
                at_least=TARGET if size == 2 else None,
                ratio_is=f"{GLOO} / {OURS}",
                copy_ms=statistics.median(each[COPY]),
            )


if __name__ == "__main__":
    main()
