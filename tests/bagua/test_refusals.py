"""Wrong calls are refused with their values before anything is sent, in the job of conftest.py."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api.communication import CommMember
from gossamer.bagua.torch_api.transfer import sending
from tests.bagua.groups import groups, refused

pytestmark = pytest.mark.usefixtures("job")

F4, F2, I4 = (torch.ones(4), torch.ones(2), torch.ones(4, dtype=torch.int64))
H4, META, SPARSE = F4.half(), torch.ones(4, device="meta"), torch.ones(4).to_sparse()

# (what the message says, the call on a communicator of two ranks)
CALLS: list[tuple[str, Callable]] = [
    ("send: dst must be from 0 to 1, got 2", lambda comm: bagua.send(F4, 2, comm)),
    ("recv: src must be from 0 to 1, got -1", lambda comm: bagua.recv(F4, -1, comm)),
    ("broadcast: src must be from 0 to 1, got 2", lambda comm: bagua.broadcast(F4, 2, comm)),
    ("broadcast_object: src must be from 0 to 1, got 7", lambda comm: bagua.broadcast_object(F4, 7, comm)),
    ("reduce: dst must be from 0 to 1, got 2", lambda comm: bagua.reduce_inplace(F4, 2, comm=comm)),
    ("gather: dst must be from 0 to 1, got 2", lambda comm: bagua.gather(F4, F4, 2, comm)),
    ("gather_inplace: dst must be from 0 to 1, got 2", lambda comm: bagua.gather_inplace(F4, 2, 2, comm)),
    ("scatter: src must be from 0 to 1, got 2", lambda comm: bagua.scatter(F4, F4, 2, comm)),
    ("scatter_inplace: src must be from 0 to 1, got 2", lambda comm: bagua.scatter_inplace(F4, 2, 2, comm)),
    (
        "allreduce: recv_tensor must have 4 elements of torch.float32 on cpu for a send_tensor of 4, "
        "got 2 of torch.float32 on cpu",
        lambda comm: bagua.allreduce(F4, F2, comm=comm),
    ),
    ("got 4 of torch.float16 on cpu", lambda comm: bagua.allreduce(F4, H4, comm=comm)),
    ("got 4 of torch.float32 on meta", lambda comm: bagua.allreduce(F4, META, comm=comm)),
    ("allgather: recv_tensor must have 8 elements", lambda comm: bagua.allgather(F4, F4, comm)),
    ("reduce: recv_tensor must have 4 elements", lambda comm: bagua.reduce(F4, F2, 0, comm=comm)),
    ("reduce_scatter: recv_tensor must have 2 elements", lambda comm: bagua.reduce_scatter(F4, F4, comm=comm)),
    ("alltoall: recv_tensor must have 4 elements", lambda comm: bagua.alltoall(F4, F2, comm)),
    ("allgather_inplace: elements must be divisible by 2 ranks, got 3", lambda c: bagua.allgather_inplace(F4[:3], c)),
    ("reduce_scatter: elements must be divisible by 2", lambda comm: bagua.reduce_scatter(F4[:3], F2, comm=comm)),
    ("reduce_scatter_inplace: elements must be div", lambda comm: bagua.reduce_scatter_inplace(F4[:3], comm=comm)),
    ("alltoall: elements must be divisible by 2", lambda comm: bagua.alltoall_inplace(F4[:3], comm)),
    ("gather_inplace: the tensor must have", lambda comm: bagua.gather_inplace(torch.ones(5), 2, 0, comm)),
    ("scatter_inplace: the tensor must have", lambda comm: bagua.scatter_inplace(torch.ones(5), 2, 0, comm)),
    ("'MAX', 'BOR', 'BAND', 'BXOR', 'AVG'], got 4", lambda c: bagua.allreduce_inplace(F4, 4, c)),
    ("AVG of torch.int64 is not defined", lambda comm: bagua.allreduce_inplace(I4, 10, comm)),
    ("AVG of torch.int64 is not defined", lambda comm: bagua.reduce(I4, I4, 0, bagua.ReduceOp.AVG, comm)),
    ("AVG of torch.int64 is not defined", lambda comm: bagua.reduce_scatter_inplace(I4, bagua.ReduceOp.AVG, comm)),
    ("BOR of torch.float32 is not defined", lambda comm: bagua.allreduce(F4, F4, bagua.ReduceOp.BOR, comm)),
    ("MAX of torch.complex64 is not defined", lambda comm: bagua.allreduce_inplace(F4 + 0j, 3, comm)),
    ("allreduce_inplace: needs a dense tensor", lambda comm: bagua.allreduce_inplace(SPARSE, comm=comm)),
    ("broadcast: needs a dense tensor", lambda comm: bagua.broadcast([1.0], comm=comm)),
    ("broadcast_coalesced: needs tensors of one dtype", lambda comm: bagua.broadcast_coalesced([F4, H4], 0, comm)),
    ("allreduce_coalesced_inplace: needs tensors of one", lambda c: bagua.allreduce_coalesced_inplace([F4, I4], 0, c)),
    ("on one device, got 0 of []", lambda comm: bagua.broadcast_coalesced([], 0, comm)),
    (
        "send_counts and send_displs must each hold 2 numbers, one for each rank, none negative, got [2] and [0, 2]",
        lambda comm: bagua.alltoall_v(F4, [2], [0, 2], F4, [2, 2], [0, 2], comm),
    ),
    ("got [2, -1] and [0, 2]", lambda comm: bagua.alltoall_v(F4, [2, 2], [0, 2], F4, [2, -1], [0, 2], comm)),
    (
        "parts of recv_tensor must not overlap and must end by its 4 elements, got [(0, 3), (2, 4)]",
        lambda comm: bagua.alltoall_v_inplace(F4, [3, 2], [0, 2], comm),
    ),
    ("got [(3, 5)]", lambda comm: bagua.alltoall_v(F4, [1, 2], [0, 3], torch.ones(9), [2, 2], [0, 2], comm)),
    ("got 4 of torch.int64", lambda comm: bagua.alltoall_v(F4, [1, 2], [0, 2], I4, [2, 2], [0, 2], comm)),
    ("barrier: comm must be a communicator, such as", lambda _: bagua.barrier(dist.group.WORLD)),
]  # fmt: skip


def test_wrong_calls_say_their_values_and_send_nothing() -> None:
    for _, group in groups():
        comm = group.get_global_communicator()
        if comm is CommMember.NON_COMM_MEMBER or comm.nranks() != 2:
            continue
        for text, call in CALLS:
            refused(text, lambda call=call, comm=comm: call(comm), gs.ConfigError)
        got = torch.ones(3)
        bagua.allreduce_inplace(got, comm=comm)
        assert got.tolist() == [2.0] * 3
    assert F4.tolist() == [1.0] * 4


def test_wrong_groups_are_refused_on_every_rank() -> None:
    for ranks in ([], [0, 0], [0, 4], [-1, 0]):
        refused(
            f"must be distinct and from 0 to 3, got {sorted(ranks)}",
            lambda r=ranks: bagua.new_group(r),
            gs.ConfigError,
        )
    refused(
        "must be a torch.distributed group, got 'gloo'",
        lambda: bagua.from_torch_group("gloo"),
        gs.ConfigError,
    )
    for make in (bagua.new_group, lambda stream: bagua.from_torch_group(dist.group.WORLD, stream)):
        refused(
            "stream must be a torch.cuda.Stream or None, got 3",
            lambda make=make: make(stream=3),
            gs.ConfigError,
        )
    assert bagua.new_group().get_global_communicator().nranks() == 4


def test_refusal_of_the_backend_is_a_config_error() -> None:
    comm = bagua.new_group().get_global_communicator()

    def refuse() -> None:
        with sending("allreduce", comm):
            raise ValueError("no BAND here")  # as NCCL does

    refused("allreduce: the backend refused it: no BAND here", refuse, gs.ConfigError)


def test_failure_of_a_transfer_is_a_comm_error() -> None:
    """Sizes differ, which no rank can know alone: the backend gossamer tells all ranks, and the group goes on."""
    comm = bagua.new_group().get_global_communicator()
    uneven = torch.ones(3 + dist.get_rank() % 2)
    refused(
        "every rank must make the same call",
        lambda: bagua.allreduce_inplace(uneven, comm=comm),
        gs.ConfigError,
    )
    group = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        comm = bagua.from_torch_group(group).get_global_communicator()
        refused("recv: failed on rank 0/2: ", lambda: bagua.recv(F4, 1, comm), gs.CommError)
