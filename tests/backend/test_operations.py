"""Every operation that moves bytes gives what Gloo gives on the same bytes: all dtypes, layouts, sizes, 1 to 4 ranks.

Reductions are in test_reductions.py, send and recv in test_p2p.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from tests.backend.jobs import (
    CPU,
    DTYPES,
    LAYOUTS,
    backend_of,
    byte_view,
    laid_out,
    options,
    run_group,
    values,
)

SIZES = [1, 2, 3, 4]
WIDTH = 3  # columns of every tensor; operations split rows


@dataclass
class Rank:
    """One rank of a run, and how it makes its tensors. The reference uses plain bytes, which Gloo can move."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    rows: int
    layout: str

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def full(self, rows: int | None = None, *, key: int = 0) -> torch.Tensor:
        whole = values(100 * key + self.rank, (self.rows if rows is None else rows, WIDTH), self.dtype)
        return byte_view(whole) if self.layout == "bytes" else laid_out(whole, self.layout, self.rank)

    def blank(self, rows: int | None = None) -> torch.Tensor:
        return self.full(rows, key=99).zero_()

    def blanks(self) -> list[torch.Tensor]:
        return [self.blank() for _ in range(self.size)]


def broadcast_from_each_root(r: Rank) -> list[torch.Tensor]:
    tensors = []
    for root in range(r.size):
        tensors.append(r.full(key=root))
        r.group.broadcast([tensors[-1]], options(BroadcastOptions, rootRank=root)).wait()
    return tensors


def allgather_list(r: Rank) -> list[torch.Tensor]:
    outputs = r.blanks()
    r.group.allgather([outputs], [r.full()]).wait()
    return outputs


def allgather_into_tensor(r: Rank) -> list[torch.Tensor]:
    output = r.blank(r.rows * r.size)
    r.group._allgather_base(output, r.full()).wait()
    return [output]


def allgather_coalesced(r: Rank) -> list[torch.Tensor]:
    inputs = [r.full(rows, key=rows) for rows in (2, 0, r.rows)]
    outputs = [[r.blank(len(x)) for x in inputs] for _ in range(r.size)]
    r.group.allgather_coalesced(outputs, inputs).wait()
    return [tensor for row in outputs for tensor in row]


def allgather_into_tensor_coalesced(r: Rank) -> list[torch.Tensor]:
    inputs = [r.full(rows, key=rows) for rows in (2, 1, r.rows)]
    outputs = [r.blank(len(x) * r.size) for x in inputs]
    r.group.allgather_into_tensor_coalesced(outputs, inputs).wait()
    return outputs


def gather_to_each_root(r: Rank) -> list[torch.Tensor]:
    kept = []
    for root in range(r.size):
        outputs = [r.blanks()] if r.rank == root else []
        r.group.gather(outputs, [r.full(key=root)], options(GatherOptions, rootRank=root)).wait()
        kept += [tensor for row in outputs for tensor in row]
    return kept


def scatter_from_each_root(r: Rank) -> list[torch.Tensor]:
    kept = []
    for root in range(r.size):
        inputs = [[r.full(key=7 * root + to) for to in range(r.size)]] if r.rank == root else []
        kept.append(r.blank())
        r.group.scatter([kept[-1]], inputs, options(ScatterOptions, rootRank=root)).wait()
    return kept


def alltoall_base_even(r: Rank) -> list[torch.Tensor]:
    output = r.blank(r.rows * r.size)
    r.group.alltoall_base(output, r.full(r.rows * r.size), [], []).wait()
    return [output]


def rows_between(source: int, to: int, rows: int) -> int:
    """Uneven, and nothing between some pairs."""
    return (source + 2 * to) % 3 * (1 + rows // 2)


def alltoall_base_uneven(r: Rank) -> list[torch.Tensor]:
    sent = [rows_between(r.rank, to, r.rows) for to in range(r.size)]
    received = [rows_between(source, r.rank, r.rows) for source in range(r.size)]
    output = r.blank(sum(received))
    r.group.alltoall_base(output, r.full(sum(sent)), received, sent).wait()
    return [output]


def alltoall_list(r: Rank) -> list[torch.Tensor]:
    """Gloo has no alltoall of lists: there one tensor is exchanged and cut."""
    sent = [rows_between(r.rank, to, r.rows) for to in range(r.size)]
    received = [rows_between(source, r.rank, r.rows) for source in range(r.size)]
    if r.layout == "bytes":
        return list(alltoall_base_uneven(r)[0].split(received))
    outputs = [r.blank(rows) for rows in received]
    inputs = [laid_out(part, r.layout, r.rank) for part in r.full(sum(sent)).split(sent)]
    r.group.alltoall(outputs, inputs).wait()
    return outputs


MOVES = [
    broadcast_from_each_root,
    allgather_list,
    allgather_into_tensor,
    allgather_coalesced,
    allgather_into_tensor_coalesced,
    gather_to_each_root,
    scatter_from_each_root,
    alltoall_base_even,
    alltoall_base_uneven,
    alltoall_list,
]


def check_moves(move: Callable, size: int, cases: list[tuple[torch.dtype, int, str]]) -> None:
    """Checks that a group of the backend under test and, with plain bytes, a group of Gloo give the same bytes."""
    tested = run_group(size, lambda group: [move(Rank(group, *case)) for case in cases])
    reference = run_group(
        size, lambda group: [move(Rank(group, case[0], case[1], "bytes")) for case in cases], kind="gloo"
    )
    for rank in range(size):
        for case, ours, gloos in zip(cases, tested[rank], reference[rank], strict=True):
            assert len(ours) == len(gloos)
            for ours_one, gloos_one in zip(ours, gloos, strict=True):
                assert ours_one.dtype == case[0]
                assert torch.equal(byte_view(ours_one), gloos_one), (case, rank)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_every_dtype_arrives_byte_for_byte(move, size):
    check_moves(move, size, [(dtype, 5, "plain") for dtype in DTYPES])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_strided_transposed_and_offset_tensors_arrive_element_for_element(move, size):
    dtypes = (torch.float32, torch.int8)
    check_moves(move, size, [(dtype, 6, layout) for layout in LAYOUTS for dtype in dtypes])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_messages_of_nothing_of_a_row_and_of_megabytes_arrive_in_turn(move, size):
    rows = [0, 1, 0, 21_846, 1, 400_001]  # of 12 bytes: 21,846 are just over 256 KiB, 400,001 are 4.6 MiB
    check_moves(move, size, [(torch.float32, count, "plain") for count in rows])


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_strided_tensors_of_megabytes_arrive(move):
    check_moves(move, 2, [(torch.float32, 400_003, LAYOUTS[-1])])


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_a_barrier_before_everybody_came(size):
    def body(group):
        came = dist.PrefixStore("came", group.get_group_store())
        counts = []
        for round_number in range(20):
            came.add(f"round{round_number}", 1)
            group.barrier().wait()
            counts.append(came.add(f"round{round_number}", 0))
        backend_of(group).monitored_barrier()
        return counts

    for counts in run_group(size, body):
        assert counts == [size] * 20


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_work_of_synchronous_and_asynchronous_calls_is_waited_for_alike(asynchronous):
    def body(group):
        tensor = values(group.rank(), (1000, WIDTH))
        output = torch.zeros(2000, WIDTH)
        reduced = group.allreduce([tensor], options(AllreduceOptions, asyncOp=asynchronous))
        if reduced is not None:
            reduced.wait()
        gathered = group._allgather_base(output, tensor, options(AllgatherOptions, asyncOp=asynchronous))
        if gathered is not None:
            gathered.wait()
        return tensor, output

    total = values(0, (1000, WIDTH)) + values(1, (1000, WIDTH))
    for tensor, output in run_group(2, body):
        assert torch.equal(tensor, total)
        assert torch.equal(output, torch.cat([total, total]))


def test_the_group_answers_what_it_is():
    def body(group):
        backend = backend_of(group)
        return backend.rank(), backend.size(), group.rank(), group.size(), list(group._device_types)

    for rank, answers in enumerate(run_group(3, body)):
        assert answers == (rank, 3, rank, 3, [CPU])
