"""The two-shot over symmetric memory, where ranks read each other's buckets in place, against Gloo: 16 MiB of float32.

With --gpu all ranks share the current GPU, so no figure is about links between GPUs: figures show staging, launches,
the memory of one GPU, and its switching between processes, for which the ranks' kernels wait. Without --gpu, the same
on the CPU. `exact` sums in rank order in float32. Int8 has the bits of the compressed two-shot over Gloo, which is
timed too. Results are checked. A figure is the median over batches of calls, on the slowest rank.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, interleaved, paired, report_against, run_processes, serve, slowest

import gossamer as gs
from gossamer import _C
from gossamer import comm as comms

MIB = 1 << 20
EXACT, INT8, GLOO, GLOO_INT8 = "exact", "Int8", "Gloo", "Int8 over Gloo"
AGAINST = {EXACT: GLOO, INT8: GLOO_INT8}
TARGET = 1.0  # times as fast
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def communicators(device: torch.device) -> tuple[Any, Any]:
    """A communicator over symmetric memory, and one over the transport that it is compared with."""
    gloo = comms.from_group(None, device)
    if device.type == "cuda":
        plain, control = comms.private(None, device)
    else:
        plain = control = comms.private(dist.new_group(backend="gossamer"), device)[0]
    return comms.symmetric(plain, control), gloo


def prepared(numel: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """The calls, each on a tensor of its own, after a check of their results."""
    own, gloo = communicators(device)
    source = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    tensors = {name: source.clone() for name in (INT8, GLOO, GLOO_INT8)}
    tensors[EXACT] = own.allocate(4 * numel).view(torch.float32).copy_(source)
    calls: dict[str, Callable[[], object]] = {
        EXACT: partial(_C.sum, own, tensors[EXACT]),
        INT8: partial(gs.all_reduce, tensors[INT8], codec=gs.Int8(), op="mean", group=own),
        GLOO: partial(dist.all_reduce, tensors[GLOO]),
        GLOO_INT8: partial(gs.all_reduce, tensors[GLOO_INT8], codec=gs.Int8(), op="mean", group=gloo),
    }
    for call in calls.values():
        call()
    torch.testing.assert_close(tensors[EXACT], tensors[GLOO], rtol=1e-5, atol=1e-5)
    if not torch.equal(tensors[INT8], tensors[GLOO_INT8]):
        raise ArithmeticError("Int8 over symmetric memory must have the bits of Int8 over Gloo")
    for tensor in tensors.values():
        tensor.zero_()  # sums of sums would overflow
    return calls


def repeated(call: Callable[[], object], calls: int, done: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        for _ in range(calls):
            call()
        done()

    return run


def worker(*, gpu: bool, mib: int, quick: bool) -> dict[str, list[float]]:
    """Milliseconds a call by contender, a figure for each turn."""
    calls = 2 if quick else 10
    done = torch.cuda.synchronize if gpu else lambda: None
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    bodies = {name: repeated(call, calls, done) for name, call in prepared(mib * MIB // 4, device).items()}
    rounds, repeats = (2, 1) if quick else (9, 3)
    turns = slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))
    return {name: [1e3 * s / calls for s in each] for name, each in turns.items()}


def main() -> None:
    options = arguments(__doc__, gpu="several ranks on the current CUDA device")
    if serve(options, worker):
        return
    os.environ[OVERLAPPING] = "1"  # of the ranks, which share a device
    mib, sizes = (1, (2,)) if options.quick else (16, (2, 4))
    where = torch.cuda.get_device_name() if options.gpu else "CPU"
    for size in sizes:
        times = run_processes(size, {"gpu": options.gpu, "mib": mib, "quick": options.quick})
        for name, peer in AGAINST.items():
            report_against(
                f"symmetric two-shot, {name}, {mib} MiB, {size} ranks on one {where}",
                times[name],
                "ms",
                (peer, times[peer]),
                paired(times[peer], times[name]),
                at_least=TARGET,
                ratio_is=f"{peer} / {name}",
                gloo_all_reduce_ms=statistics.median(times[GLOO]),
            )


if __name__ == "__main__":
    main()
