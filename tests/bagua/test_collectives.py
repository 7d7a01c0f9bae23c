"""gossamer.bagua.torch_api.communication on groups of one to four ranks, in the job of conftest.py."""

import operator
import threading
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api.communication import CommMember
from tests.bagua.groups import HOSTS, communicators, equal, groups, refused, values

pytestmark = pytest.mark.usefixtures("job")

COUNTS = (0, 1, 5, 1021)
OUTSIDE = CommMember.NON_COMM_MEMBER


def members() -> Iterator[tuple[str, Any, int, int]]:
    """(description, communicator, rank, size) where this rank takes part."""
    for case, comm in communicators():
        if comm is not OUTSIDE:
            yield case, comm, comm.rank(), comm.nranks()


def total(size: int, count: int) -> torch.Tensor:
    return sum((values(rank, count) for rank in range(size)), torch.zeros(count, dtype=torch.float64))


def joined(size: int, count: int) -> torch.Tensor:
    return torch.cat([values(rank, count) for rank in range(size)])


def test_places_are_those_of_the_launcher() -> None:
    rank = dist.get_rank()
    assert bagua.is_initialized()
    assert (bagua.get_rank(), bagua.get_world_size()) == (rank, 4)
    assert (bagua.get_local_rank(), bagua.get_local_size()) == (rank, 4)  # torchrun knows one host
    assert bagua.env.get_node_rank() == next(host for host, ranks in enumerate(HOSTS) if rank in ranks)
    refused("must be called once", bagua.init_process_group, gs.ConfigError)


def test_communicators_number_their_ranks_from_zero() -> None:
    for case, comm, rank, size in members():
        assert (rank, size) == (dist.get_rank(), int(case[0])), case
        assert comm.device_id() == -1 or torch.cuda.is_available()
        comm.barrier()
        bagua.barrier(comm)
    group = bagua.new_group([3, 1])
    assert group.ranks == [1, 3]
    comm = group.get_global_communicator()
    if dist.get_rank() in (1, 3):
        assert (comm.rank(), comm.nranks()) == (dist.get_rank() // 2, 2)
        got = torch.full((2,), float(dist.get_rank()))
        bagua.broadcast(got, 1, comm)
        assert got.tolist() == [3.0, 3.0]  # rank 1 of the communicator
    else:
        assert comm is OUTSIDE


def test_communicators_of_a_host_and_across_hosts() -> None:
    rank = dist.get_rank()
    own = next(ranks for ranks in HOSTS if rank in ranks)
    for group in (bagua.new_group(), bagua.from_torch_group(dist.group.WORLD)):
        intra, inter = group.get_intra_node_communicator(), group.get_inter_node_communicator()
        got = torch.tensor([rank])
        bagua.allreduce_inplace(got, comm=intra)
        assert (got.item(), intra.rank(), intra.nranks()) == (sum(own), own.index(rank), len(own))
        assert (inter is OUTSIDE) == (rank not in (0, 3))
        got = torch.tensor([rank])
        bagua.allreduce_inplace(got, comm=inter)
        assert got.item() == (3 if rank in (0, 3) else rank)
    # a host without ranks, and first ranks that are not the host's first
    group = bagua.new_group([1, 2])
    intra, inter = group.get_intra_node_communicator(), group.get_inter_node_communicator()
    assert (intra is OUTSIDE) == (rank not in (1, 2))
    assert (inter is OUTSIDE) == (rank != 1)
    assert rank != 1 or (inter.nranks(), intra.nranks()) == (1, 2)


def test_group_made_from_torchs_has_a_host_communicator_where_it_is_on_one() -> None:
    for case, group in groups():
        if group.get_global_communicator() is OUTSIDE:
            assert group.get_intra_node_communicator() is OUTSIDE
        elif case.startswith("4"):  # on two hosts
            refused(
                "make the group by new_group([0, 1, 2, 3])", group.get_intra_node_communicator, gs.ConfigError
            )
            refused("are on 2 hosts", group.get_inter_node_communicator, gs.ConfigError)
        else:
            assert group.get_intra_node_communicator().nranks() == int(case[0])
            assert (group.get_inter_node_communicator() is OUTSIDE) == (dist.get_rank() != 0)


def test_all_reduce_of_every_operation() -> None:
    folds = {"SUM": operator.add, "PRODUCT": operator.mul, "MIN": torch.minimum, "MAX": torch.maximum}
    bits = {"BOR": operator.or_, "BAND": operator.and_, "BXOR": operator.xor}
    for case, comm, rank, size in members():
        for name, fold in (folds | bits).items():
            for dtype in (torch.int32,) if name in bits else (torch.float32, torch.float64, torch.int64):
                want = reduce(fold, [values(peer, 37, dtype) for peer in range(size)])
                sent, got = values(rank, 37, dtype), torch.zeros(37, dtype=dtype)
                bagua.allreduce(sent, got, bagua.ReduceOp[name], comm)
                equal(got, want, f"{name} {dtype} {case}")
                equal(sent, values(rank, 37, dtype), "sent")
        for dtype in (torch.float64, torch.bfloat16):
            got = 12 * values(rank, 37, dtype)
            bagua.allreduce_inplace(got, 10, comm)  # AVG, by its number
            equal(got, (12 * total(size, 37) / size).to(dtype), f"AVG {dtype} {case}")


def test_collectives_of_every_size() -> None:
    for case, comm, rank, size in members():
        for count in COUNTS:
            own, case_count = values(rank, count), f"{case}, {count}"
            got = own.clone()
            bagua.allreduce_inplace(got, comm=comm)
            equal(got, total(size, count), f"allreduce_inplace {case_count}")
            got = torch.zeros(size * count, dtype=own.dtype)
            bagua.allgather(own, got, comm)
            equal(got, joined(size, count), f"allgather {case_count}")
            got = torch.zeros(size * count, dtype=own.dtype)
            got[rank * count : (rank + 1) * count] = own
            bagua.allgather_inplace(got, comm)
            equal(got, joined(size, count), f"allgather_inplace {case_count}")
            wide, part = values(rank, size * count), slice(rank * count, (rank + 1) * count)
            got = torch.zeros(count, dtype=own.dtype)
            bagua.reduce_scatter(wide, got, comm=comm)
            equal(got, total(size, size * count)[part], f"reduce_scatter {case_count}")
            got, want = wide.clone(), wide.clone()
            want[part] = total(size, size * count)[part]
            bagua.reduce_scatter_inplace(got, bagua.ReduceOp.SUM, comm)
            equal(got, want, f"reduce_scatter_inplace {case_count}")
            exchanged = torch.cat([values(peer, size * count)[part] for peer in range(size)])
            got = torch.zeros(size * count, dtype=own.dtype)
            bagua.alltoall(wide, got, comm)
            equal(got, exchanged, f"alltoall {case_count}")
            got = wide.clone()
            bagua.alltoall_inplace(got, comm)
            equal(got, exchanged, f"alltoall_inplace {case_count}")


def test_rooted_collectives_for_every_root() -> None:
    for case, comm, rank, size in members():
        for root in range(size):
            for count in COUNTS:
                what, own, untouched = (
                    f"{case}, {count}, root {root}",
                    values(rank, count),
                    torch.full((1,), -1.0),
                )
                got = own.clone()
                bagua.broadcast(got, root, comm)
                equal(got, values(root, count), f"broadcast {what}")
                got = torch.full((count,), -1.0, dtype=own.dtype)
                bagua.reduce(own, got, root, comm=comm)
                want = total(size, count) if rank == root else torch.full((count,), -1.0, dtype=own.dtype)
                equal(got, want, f"reduce {what}")
                got = own.clone()
                bagua.reduce_inplace(got, root, bagua.ReduceOp.MAX, comm)
                largest = torch.stack([values(peer, count) for peer in range(size)]).amax(0)
                equal(got, largest if rank == root else own, f"reduce_inplace {what}")
                got = torch.zeros(size * count, dtype=own.dtype) if rank == root else untouched
                bagua.gather(own, got, root, comm)
                equal(got, joined(size, count) if rank == root else torch.full((1,), -1.0), f"gather {what}")
                got = own.clone()
                if rank == root:
                    got = torch.zeros(size * count, dtype=own.dtype)
                    got[root * count : (root + 1) * count] = own
                bagua.gather_inplace(got, count, root, comm)
                equal(got, joined(size, count) if rank == root else own, f"gather_inplace {what}")
                part = slice(rank * count, (rank + 1) * count)
                got = torch.zeros(count, dtype=own.dtype)
                bagua.scatter(values(root, size * count) if rank == root else untouched, got, root, comm)
                equal(got, values(root, size * count)[part], f"scatter {what}")
                got = values(root, size * count) if rank == root else torch.zeros(count, dtype=own.dtype)
                bagua.scatter_inplace(got, count, root, comm)
                want = values(root, size * count)
                equal(got, want if rank == root else want[part], f"scatter_inplace {what}")


def test_messages_coalesced_and_objects() -> None:
    for case, comm, rank, size in members():
        if size > 1:
            got = torch.zeros(5, dtype=torch.float64)
            if rank == 0:
                bagua.send(values(0, 5), size - 1, comm)
            elif rank == size - 1:
                bagua.recv(got, 0, comm)
                equal(got, values(0, 5), f"recv {case}")
        tensors = [values(rank, count).view(shape) for count, shape in ((6, (2, 3)), (1, ()), (0, (0,)))]
        bagua.broadcast_coalesced(tensors, size - 1, comm)
        equal(tensors[0], values(size - 1, 6).view(2, 3), f"broadcast_coalesced {case}")
        equal(tensors[1], values(size - 1, 1).view(()), f"broadcast_coalesced {case}")
        tensors = [values(rank, 6).view(2, 3), values(rank, 4)]
        bagua.allreduce_coalesced_inplace(tensors, comm=comm)
        equal(tensors[0], total(size, 6).view(2, 3), f"allreduce_coalesced {case}")
        equal(tensors[1], total(size, 4), f"allreduce_coalesced {case}")
        assert bagua.broadcast_object({"rank": rank}, size - 1, comm) == {"rank": size - 1}


def test_uneven_exchange_with_gaps_and_nothing_for_some() -> None:
    for case, comm, rank, size in members():

        def count(source: int, target: int) -> int:
            return (source + 2 * target) % 4  # 0 for some pairs

        send_counts = [count(rank, peer) for peer in range(size)]
        recv_counts = [count(peer, rank) for peer in range(size)]
        send_displs = [5 * peer for peer in reversed(range(size))]
        recv_displs = [4 * peer + 1 for peer in range(size)]
        got, want = torch.full((4 * size + 1,), -1.0).double(), torch.full((4 * size + 1,), -1.0).double()
        for peer in range(size):
            first = 5 * (size - 1 - rank)
            part = values(peer, 5 * size)[first : first + recv_counts[peer]]
            want[recv_displs[peer] : recv_displs[peer] + recv_counts[peer]] = part
        bagua.alltoall_v(
            values(rank, 5 * size), send_counts, send_displs, got, recv_counts, recv_displs, comm
        )
        equal(got, want, f"alltoall_v {case}")
        again = torch.full_like(want, -1.0)
        ends = [*send_displs, 5 * size], [*recv_displs, 4 * size]  # as Bagua's example gives them
        bagua.alltoall_v(values(rank, 5 * size), send_counts, ends[0], again, recv_counts, ends[1], comm)
        equal(again, want, f"alltoall_v with ends {case}")

        counts, displs = [(rank + peer) % 3 for peer in range(size)], [3 * peer for peer in range(size)]
        got, want = values(rank, 3 * size), values(rank, 3 * size)
        for peer in range(size):
            part = values(peer, 3 * size)[3 * rank : 3 * rank + counts[peer]]
            want[3 * peer : 3 * peer + counts[peer]] = part
        bagua.alltoall_v_inplace(got, counts, displs, comm)
        equal(got, want, f"alltoall_v_inplace {case}")


def test_strided_tensors_and_parameters() -> None:
    for case, comm, rank, size in members():
        grid = torch.zeros(6, 4, dtype=torch.float64)
        view = grid[:, ::2].t()  # [2, 6], neither contiguous nor alone in its memory
        view.copy_(values(rank, 12).view(2, 6))
        bagua.allreduce_inplace(view, comm=comm)
        equal(view, total(size, 12).view(2, 6), case)
        equal(grid[:, 1::2], torch.zeros(6, 2).double(), f"{case}, between")
        param = torch.nn.Parameter(values(rank, 3))
        bagua.broadcast(param, 0, comm)
        equal(param.detach(), values(0, 3), case)
        assert param.requires_grad
        assert param.is_leaf


def test_ranks_that_are_not_in_it_return_at_once() -> None:
    ones = torch.ones(2)
    calls = {
        "send": (ones, 0), "recv": (ones, 0), "broadcast": (ones,), "broadcast_coalesced": ([ones],),
        "broadcast_object": (1,), "allreduce": (ones, ones), "allreduce_inplace": (ones,),
        "allreduce_coalesced_inplace": ([ones],), "reduce": (ones, ones, 0), "reduce_inplace": (ones, 0),
        "allgather": (ones, ones), "allgather_inplace": (ones,), "gather": (ones, ones, 0),
        "gather_inplace": (ones, 1, 0), "scatter": (ones, ones, 0), "scatter_inplace": (ones, 1, 0),
        "reduce_scatter": (ones, ones), "reduce_scatter_inplace": (ones,), "alltoall": (ones, ones),
        "alltoall_inplace": (ones,), "alltoall_v": (ones, [1], [0], ones, [1], [0]),
        "alltoall_v_inplace": (ones, [1], [0]), "barrier": (),
    }  # fmt: skip
    names = [name for name in bagua.communication.__all__ if name[0].islower()]
    others = {"from_torch_group", "init_process_group", "is_initialized", "new_group"}
    assert {*calls, *others} == {*names}
    for name, arguments in calls.items():
        assert getattr(bagua.communication, name)(*arguments, comm=OUTSIDE) is None
    assert ones.tolist() == [1.0, 1.0]


def test_aborted_communicators_refuse_and_release() -> None:
    group = bagua.new_group([0, 1])
    other = dist.new_group([0, 1])
    comm = group.get_global_communicator()
    if comm is OUTSIDE:
        return
    assert not comm.check_abort()
    if comm.rank() == 0:
        threading.Timer(0.3, comm.abort).start()
        refused("", lambda: bagua.allreduce_inplace(torch.ones(3), comm=comm), gs.CommError)
        assert comm.check_abort()
        refused("aborted on rank 0/2", lambda: bagua.barrier(comm), gs.CommError)
        refused("aborted on rank 0/2", comm.barrier, gs.CommError)
    dist.barrier(other)
    if comm.rank() == 1:

        def twice() -> (
            None
        ):  # rank 0 had come to the first before it was aborted, and may have given its part
            for _ in range(2):
                bagua.allreduce_inplace(torch.ones(3), comm=comm)

        refused("rank 0 has failed", twice, gs.CommError)
