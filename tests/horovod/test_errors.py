"""Every error that Horovod knows is raised on every rank, and the next operations work; in the job of conftest.py."""

import gc
import warnings
from functools import partial

import pytest
import torch

import gossamer.horovod.torch as hvd
from tests.horovod.sets import mine, refused, still_works

pytestmark = pytest.mark.usefixtures("job")

INTERNAL = hvd.HorovodInternalError


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


INTS = ones(4, dtype=torch.int32)
# The calls of the first rank of a set and of the others: (function, arguments of the first rank, of the others).
DIFFERING = {
    "dtype": (hvd.allreduce, {}, {"tensor": INTS}, {"tensor": ones(4)}),
    "shape": (hvd.allreduce, {}, {"tensor": ones(3)}, {"tensor": ones(4)}),
    "other shape of as many": (hvd.allreduce, {}, {"tensor": ones(2, 3)}, {"tensor": ones(3, 2)}),
    "prescale": (hvd.allreduce, {"tensor": ones(3)}, {"prescale_factor": 2.0}, {}),
    "postscale": (hvd.allreduce, {"tensor": ones(3)}, {"postscale_factor": 2.0}, {}),
    "op": (hvd.allreduce, {"tensor": ones(3)}, {"op": hvd.Sum}, {"op": hvd.Max}),
    "gather's dimensions": (hvd.allgather, {}, {"tensor": ones(3)}, {"tensor": ones(3, 1)}),
    "gather's tail": (hvd.allgather, {}, {"tensor": ones(3, 2)}, {"tensor": ones(3, 4)}),
    "gather's dtype": (hvd.allgather, {}, {"tensor": INTS}, {"tensor": ones(4)}),
    "alltoall's tail": (hvd.alltoall, {}, {"tensor": ones(12, 2)}, {"tensor": ones(12, 4)}),
    "alltoall's dtype": (hvd.alltoall, {}, {"tensor": INTS.repeat(3)}, {"tensor": ones(12)}),
    "scatter's shape": (hvd.reducescatter, {}, {"tensor": ones(3)}, {"tensor": ones(4)}),
    "scatter's dtype": (hvd.reducescatter, {}, {"tensor": INTS}, {"tensor": ones(4)}),
    "scatter's op": (hvd.reducescatter, {"tensor": ones(4)}, {"op": hvd.Sum}, {"op": hvd.Average}),
    "a group's member": (
        hvd.grouped_allreduce,
        {},
        {"tensors": [ones(2), ones(3)]},
        {"tensors": [ones(2), ones(4)]},
    ),
    "a group's size": (hvd.grouped_allreduce, {}, {"tensors": [ones(2)] * 2}, {"tensors": [ones(2)] * 3}),
}


def test_ranks_that_differ_are_told_so_on_every_rank() -> None:
    for process_set, rank, size in mine():
        if size == 1:
            continue
        first, second = process_set.ranks[:2]
        roots = {
            "broadcast's shape": (
                hvd.broadcast,
                {"root_rank": first},
                {"tensor": ones(3)},
                {"tensor": ones(4)},
            ),
            "broadcast's dtype": (hvd.broadcast, {"root_rank": first}, {"tensor": INTS}, {"tensor": ones(4)}),
            "root": (hvd.broadcast, {"tensor": ones(3)}, {"root_rank": first}, {"root_rank": second}),
        }
        for case, (call, both, of_first, of_others) in (DIFFERING | roots).items():
            own = of_others if rank else of_first
            for name in ("e", None):
                try:
                    call(**both, **own, name=name, process_set=process_set)
                except INTERNAL as error:
                    text = str(error)
                else:
                    pytest.fail(f"{case}: no error")
                if case != "a group's size":
                    assert str(first) in text, f"{case}: {text}"
                    assert "test_errors.py:" in text, f"{case}: {text}"
        hvd.barrier(process_set=process_set)
    still_works()


def test_scalars_cannot_be_gathered_or_exchanged() -> None:
    for process_set, _, _ in mine():
        for call in (hvd.allgather, hvd.alltoall):
            with pytest.raises((INTERNAL, ValueError)):
                call(torch.tensor(1.0), process_set=process_set)
    still_works()


def test_an_error_of_one_rank_alone_fails_the_operation_on_the_others() -> None:
    for process_set, rank, size in mine():
        fits = {
            hvd.broadcast: {"tensor": ones(3), "root_rank": process_set.ranks[0]},
            hvd.allreduce: {"tensor": ones(3)},
            hvd.alltoall: {"tensor": ones(size)},
            hvd.reducescatter: {"tensor": ones(3)},
            hvd.grouped_allreduce: {"tensors": [ones(2)] * 2},
        }
        outside = next(peer for peer in range(5) if peer not in process_set.ranks)
        wrong = [
            ("root_rank must be one of", hvd.broadcast, {"root_rank": outside}),
            ("op must be one of", hvd.allreduce, {"op": 99}),
            ("op must be one of", hvd.grouped_allreduce, {"op": 99}),
            ("must be a tensor", hvd.allreduce, {"tensor": [1.0]}),
            ("must be tensors", hvd.grouped_allreduce, {"tensors": [ones(2), None]}),
            ("sum of at most", hvd.alltoall, {"splits": [4] * size}),
            ("one a rank", hvd.alltoall, {"splits": [0] * (size + 1)}),
            ("from 0", hvd.alltoall, {"splits": [-1] + [0] * (size - 1)}),
            ("1-dimensional", hvd.alltoall, {"splits": torch.zeros(1, size, dtype=torch.int32)}),
            ("int32 or int64", hvd.alltoall, {"splits": torch.zeros(size)}),
            ("got a scalar", hvd.reducescatter, {"tensor": torch.tensor(1.0)}),
        ]
        if size > 1:
            wrong.append(("divisible", hvd.alltoall, {"tensor": ones(2 * size + 1)}))
        for text, call, arguments in wrong:
            for name in ("l", None):
                own = fits[call] | {"name": name, "process_set": process_set}
                if rank == size - 1:
                    refused(text, partial(call, **own | arguments), ValueError)
                else:
                    refused(text, partial(call, **own))
                hvd.barrier(process_set=process_set)  # where unnamed groups are counted again
                still_works_in(process_set, size)


def still_works_in(process_set, size) -> None:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=process_set).item() == size


def test_reducescatter_knows_average_and_sum_alone() -> None:
    for process_set, _, _ in mine():
        for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
            call = partial(hvd.reducescatter, ones(8), op=op, process_set=process_set)
            refused("Average or Sum", call)
    still_works()


def test_a_name_in_flight_cannot_be_given_again_and_goes_on() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        refused("twice", lambda: hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum), ValueError)
        assert not hvd.poll(handle)
        other_kind = hvd.allgather_async(torch.ones(2), name="twice")
        hvd.allgather(torch.zeros(1), name="the others begin")
        assert hvd.synchronize(handle).tolist() == [4, 4]
        assert hvd.synchronize(other_kind).tolist() == [1] * 8
    else:
        hvd.allgather(torch.zeros(1), name="the others begin")
        gathered = hvd.allgather_async(torch.ones(2), name="twice")
        assert hvd.allreduce(torch.ones(2), name="twice", op=hvd.Sum).tolist() == [4, 4]
        assert hvd.synchronize(gathered).tolist() == [1] * 8
    still_works()


def test_only_members_run_operations_of_a_set() -> None:
    for process_set in (hvd.ProcessSet([0]), hvd.ProcessSet([0, 1])):
        refused(
            "must be registered",
            lambda one=process_set: hvd.allreduce(torch.ones(1), process_set=one),
            ValueError,
        )
    from tests.horovod.sets import SETS

    for process_set in SETS:
        if not process_set.included():
            for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
                refused(
                    "must be a member",
                    lambda c=call, s=process_set: c(torch.ones(4), process_set=s),
                    ValueError,
                )
            refused("must be a member", lambda s=process_set: hvd.barrier(process_set=s), ValueError)
            refused("must be a member", process_set.rank, ValueError)
    refused("HOROVOD_DYNAMIC_PROCESS_SETS", lambda: hvd.add_process_set([0, 1]), ValueError)
    refused("HOROVOD_DYNAMIC_PROCESS_SETS", lambda: hvd.remove_process_set(SETS[0]), ValueError)
    still_works()


def test_op_and_average_exclude_each_other_and_average_warns() -> None:
    refused("not both", lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), ValueError)
    for call in (hvd.allreduce, hvd.allreduce_, lambda *a: hvd.synchronize(hvd.allreduce_async(*a))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert call(torch.ones(1), False).item() == 4
        assert [(one.category, one.filename) for one in caught] == [(DeprecationWarning, __file__)]


def test_handles_count_from_one_and_end_with_synchronize() -> None:
    first = hvd.allreduce_async(torch.ones(2))
    second = hvd.allreduce_async(torch.ones(2))
    assert isinstance(first, int)
    assert second == first + 1
    hvd.synchronize(int(second))
    assert hvd.synchronize(first).tolist() == [1, 1]
    assert hvd.synchronize(first) is None
    assert hvd.synchronize(10**9) is None
    for handle in (first, second, 10**9):
        refused("synchronized", lambda handle=handle: hvd.poll(handle), ValueError)


def test_a_handle_that_nobody_keeps_frees_its_tensors() -> None:
    import weakref

    output = []
    for _ in range(3):
        tensor = torch.ones(1000)
        hvd.allreduce_async_(tensor)
        output.append(weakref.ref(tensor))
        del tensor
    hvd.barrier()
    gc.collect()
    assert [reference() for reference in output] == [None] * 3


def test_unnamed_operations_line_up_again_after_an_error_of_one_rank() -> None:
    if hvd.rank() == 1:
        refused("must be a tensor", lambda: hvd.allreduce(None), ValueError)
    else:
        refused("must be a tensor", lambda: hvd.allreduce(torch.ones(2)))
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [4, 4]
    # A rank that skips one matches again after the barrier.
    handles = [] if hvd.rank() == 1 else [hvd.allreduce_async(torch.ones(2))]
    hvd.barrier()
    assert hvd.allreduce(torch.full((2,), 3.0), op=hvd.Sum).tolist() == [12, 12]
    del handles
