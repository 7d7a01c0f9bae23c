"""The backend under test and Gloo beside it, as groups of ranks in threads; inputs that every rank can compute.

A group is a torch.distributed.ProcessGroup around one backend, without a default group: its methods take what
the backend's take, and it also reaches those that are not bound on Backend (coalesced gathers, sparse sums).
Used by the tests of this room. BACKEND_UNDER_TEST=gloo in the environment runs them on Gloo instead.
"""

import os
import random
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions

import gossamer
from gossamer.comm.backend import connect_codec
from tests.support.ranks import keep_alive, run_threads

TESTED = os.environ.get("BACKEND_UNDER_TEST", "gossamer")
TIMEOUT_S = 30.0
CPU = torch.device("cpu")
OPS = dist.ReduceOp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *FLOAT8, *COMPLEX, *INTEGERS, torch.bool)
LAYOUTS = ("strided", "transposed", "offset", "mixed")
if TESTED == "gloo":  # what Gloo gets right
    DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
    LAYOUTS = ("offset",)


def make_backend(kind: Any, store: dist.Store, rank: int, size: int, *, timeout_s: float = TIMEOUT_S) -> Any:
    place = (store, rank, size, timedelta(seconds=timeout_s))
    if kind == "codec":  # values() are exact in bfloat16
        kind = gossamer.Options(gossamer.BF16(), gather_codec=gossamer.BF16(), min_bytes=0)
    if isinstance(kind, gossamer.Options):
        return gossamer._C.CodecBackend(*place, kind, connect_codec)
    return (dist.ProcessGroupGloo if kind == "gloo" else gossamer._C.GossamerBackend)(*place)


def make_group(
    kind: Any, store: dist.Store, rank: int, size: int, *, timeout_s: float = TIMEOUT_S
) -> dist.ProcessGroup:
    backend = make_backend(kind, store, rank, size, timeout_s=timeout_s)
    keep_alive([backend])
    group = dist.ProcessGroup(store, rank, size)
    types = dist.ProcessGroup.BackendType
    backend_type = types.GLOO if kind == "gloo" else types.CUSTOM
    group._register_backend(CPU, backend_type, backend)
    group._set_default_backend(backend_type)
    return group


def backend_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(CPU)


def run_group(
    size: int,
    body: Callable[[dist.ProcessGroup], Any],
    *,
    kind: Any = TESTED,
    timeout_s: float = TIMEOUT_S,
    errors: bool = False,
) -> list:
    """body(group) on `size` ranks as threads; results (with errors=True also exceptions) in rank order."""
    store = dist.HashStore()

    def rank_body(rank: int) -> Any:
        return body(make_group(kind, store, rank, size, timeout_s=timeout_s))

    return run_threads(size, rank_body, errors=errors, timeout_s=timeout_s + 30)


def values(key: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers of at most 3: sums and products of four of them are exact in every order in nearly every dtype."""
    generator = torch.Generator().manual_seed(key)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    whole = torch.randint(low, 2 if dtype == torch.bool else 4, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(whole.double(), whole.flip(0).double()).to(dtype)
    return whole.to(dtype)


def noise(key: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values over nine powers of two: their sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(key)
    scale = torch.exp2(torch.randint(-4, 5, shape, generator=generator).double())
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def laid_out(tensor: torch.Tensor, layout: str, rank: int = 0) -> torch.Tensor:
    """The same values and shape in other memory: plain, strided, transposed, offset, or (mixed) one of them a rank."""
    if layout == "mixed":
        layout = ("strided", "plain", "transposed", "offset")[rank % 4]
    if layout == "strided":
        return tensor.new_zeros(*tensor.shape, 2)[..., 1].copy_(tensor)
    if layout == "transposed":
        return tensor.new_zeros(tensor.shape[::-1]).permute(*reversed(range(tensor.dim()))).copy_(tensor)
    if layout == "offset":
        return tensor.new_zeros(tensor.numel() + 3)[1 : 1 + tensor.numel()].view(tensor.shape).copy_(tensor)
    return tensor.clone()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_bits(got: torch.Tensor, want: torch.Tensor, case: object = "") -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), case
    different = int((byte_view(got.flatten()) != byte_view(want.flatten())).sum())
    assert different == 0, f"{different} of {got.nbytes} bytes differ {case}"


def named_ranks(error: object) -> set[int]:
    """The ranks that a message names: {0, 2, 3} for "rank 0/4 all_reduce: ...; silent: ranks 2, 3"."""
    runs = re.findall(r"\branks? \[?(\d+(?:(?:, | and )\d+)*)", str(error), re.IGNORECASE)
    return {int(rank) for run in runs for rank in re.findall(r"\d+", run)}


def options(kind: type, **fields: Any) -> Any:
    """Fills one of c10d's option structs field by field, as in options(dist.ReduceOptions, rootRank=1)."""
    filled = kind()
    for name, value in fields.items():
        setattr(filled, name, value)
    return filled


Call = tuple[
    list[Any], Callable[[], None]
]  # the works of one call, and the check of its results when they are done


def random_call(group: dist.ProcessGroup, key: int, *, largest: int = 5000) -> Call:
    """Begins the call that `key` draws, the same on every rank of the group; its results are computed locally."""
    draw = random.Random(key)
    rank, size = group.rank(), group.size()
    count = draw.choice([0, 1, 2, draw.randrange(1, 100), draw.randrange(1, largest), largest])
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8])
    root = draw.randrange(size)
    case = f"(call {key}: {{}} of {count} {dtype}, root {root}, rank {rank}/{size})"

    def of(source: int, rows: int = 1) -> torch.Tensor:
        return values(1000 * key + source, (rows * count,), dtype)

    def begun(name: str, works: Any, got: list[torch.Tensor], want: Callable[[], list[torch.Tensor]]) -> Call:
        def check() -> None:
            for one, other in zip(got, want(), strict=True):
                assert_bits(one, other, case.format(name))

        return (works if isinstance(works, list) else [works]), check

    def total(rows: int = 1) -> torch.Tensor:
        return torch.stack([of(source, rows) for source in range(size)]).sum(0, dtype=dtype)

    def everyone() -> list[torch.Tensor]:
        return [of(source) for source in range(size)]

    mine, blank, wide = of(rank), torch.empty(count, dtype=dtype), torch.empty(size * count, dtype=dtype)
    kind = draw.choice(
        ["allreduce", "broadcast", "allgather", "scattered", "alltoall", "gather", "ring", "barrier"]
    )
    if kind == "allreduce":
        return begun(kind, group.allreduce([mine]), [mine], lambda: [total()])
    if kind == "broadcast":
        work = group.broadcast([mine], options(BroadcastOptions, rootRank=root))
        return begun(kind, work, [mine], lambda: [of(root)])
    if kind == "allgather":
        return begun(kind, group._allgather_base(wide, mine), [wide], lambda: [torch.cat(everyone())])
    if kind == "scattered":
        work = group._reduce_scatter_base(blank, of(rank, size))
        return begun(kind, work, [blank], lambda: [total(size)[rank * count : (rank + 1) * count]])
    if kind == "alltoall":
        work = group.alltoall_base(wide, of(rank, size), [], [])
        parts = slice(rank * count, (rank + 1) * count)
        return begun(kind, work, [wide], lambda: [torch.cat([of(p, size)[parts] for p in range(size)])])
    if kind == "gather":
        outputs = [torch.empty_like(mine) for _ in range(size)] if rank == root else []
        work = group.gather([outputs] if outputs else [], [mine], options(GatherOptions, rootRank=root))
        return begun(kind, work, outputs, lambda: everyone() if outputs else [])
    if kind == "ring" and size > 1:
        tag = draw.randrange(1000)
        works = [group.recv([blank], (rank - 1) % size, tag), group.send([mine], (rank + 1) % size, tag)]
        return begun(kind, works, [blank], lambda: [of((rank - 1) % size)])
    return begun("barrier", group.barrier(), [], list)


def join(backend: str) -> None:
    """In a process of a job: makes the default group."""
    dist.init_process_group(backend, timeout=timedelta(seconds=40))
