"""Operations in another order on each rank, thousands of them, and joins; in the job of conftest.py."""

import random
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch

import gossamer.horovod.torch as hvd
from tests.horovod.sets import mine, refused, same, still_works, values

pytestmark = pytest.mark.usefixtures("job")

ROUNDS = 8
OPERATIONS = 120  # of each process set, in a round
KINDS = ("allreduce", "in place", "group", "allgather", "broadcast", "alltoall", "reducescatter")
DTYPES = (torch.float32, torch.float64, torch.int32)


def submit(
    index: int, kind: str, draw: random.Random, *, process_set: Any, rank: int, size: int
) -> tuple[int, Any]:
    """(handle, the expected result). `draw` has the same state on all ranks."""
    dtype, rows, root = draw.choice(DTYPES), draw.randint(1, 40), draw.randrange(size)
    inputs = [values(peer, (rows * size, 2), dtype, salt=index) for peer in range(size)]
    own, total = inputs[rank], sum(inputs[1:], inputs[0])
    options = {"name": f"{index}", "process_set": process_set}
    if kind == "allreduce":
        return hvd.allreduce_async(own, op=hvd.Sum, **options), total
    if kind == "in place":
        return hvd.allreduce_async_(own.clone(), op=hvd.Sum, **options), total
    if kind == "group":
        return hvd.grouped_allreduce_async([own, own[:1]], op=hvd.Sum, **options), [total, total[:1]]
    if kind == "allgather":
        return hvd.allgather_async(own, **options), torch.cat(inputs)
    if kind == "broadcast":
        return hvd.broadcast_async(own, process_set.ranks[root], **options), inputs[root]
    if kind == "alltoall":
        parts = [tensor.split(rows)[rank] for tensor in inputs]
        return hvd.alltoall_async(own, **options), (torch.cat(parts), torch.IntTensor([rows] * size))
    return hvd.reducescatter_async(own, op=hvd.Sum, **options), total.split(rows)[rank]


def test_operations_match_whatever_order_ranks_submit_them_in() -> None:
    seed = int(hvd.broadcast(torch.tensor(random.SystemRandom().randrange(10**6)), 0))
    if hvd.rank() == 0:
        print("seed", seed)
    shuffle = random.Random(seed + hvd.rank())
    count = 0
    for round_number in range(ROUNDS):
        work = []
        for number, (process_set, rank, size) in enumerate(mine()):
            # The same names in the second half of the rounds: from the cache.
            indices = range(
                OPERATIONS * (round_number % (ROUNDS // 2)), OPERATIONS * (round_number % (ROUNDS // 2) + 1)
            )
            work += [(index, process_set, rank, size, number) for index in indices]
        shuffle.shuffle(work)
        waiting: deque[tuple[int, Any, object]] = deque()
        for index, process_set, rank, size, _ in work:
            draw = random.Random(f"{seed} {process_set.ranks} {index}")
            handle, want = submit(
                index, draw.choice(KINDS), draw, process_set=process_set, rank=rank, size=size
            )
            waiting.append((handle, want, (seed, process_set.ranks, index)))
            count += 1
        shuffle.shuffle(waiting)
        for handle, want, case in waiting:
            got = hvd.synchronize(handle)
            several = isinstance(want, (list, tuple))
            for one, expected in zip(got if several else [got], want if several else [want], strict=True):
                same(one, expected, case)
    if hvd.rank() == 3:
        print("operations", count)


def test_sets_work_on_their_own_threads_of_the_script() -> None:
    import threading

    failures = []

    def body(process_set: Any, rank: int, size: int) -> None:
        try:
            for index in range(50):
                want = float(sum(range(1, size + 1)))
                got = hvd.allreduce(
                    torch.full((100,), rank + 1.0), name=f"t{index}", op=hvd.Sum, process_set=process_set
                )
                assert got.unique().item() == want
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=one) for one in mine()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_joined_rank_adds_zeros_until_all_have_joined() -> None:
    for process_set, rank, size in mine():
        for step in range(rank + 1):
            active = size - step  # ranks that have not joined
            got = hvd.allreduce(torch.ones(3), name=f"step{step}", process_set=process_set)
            want = torch.ones(3) * active * (torch.ones(1) / size)
            torch.testing.assert_close(got, want)
            got = hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum, process_set=process_set)
            assert got[1].tolist() == [active] * 3
        if size > 1 and rank == size - 1:
            hvd.allreduce(torch.ones(1), name="alone", process_set=process_set)
            for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
                refused("join", partial(call, torch.ones(size), process_set=process_set))
            refused(
                "join", partial(hvd.broadcast, torch.ones(2), process_set.ranks[0], process_set=process_set)
            )
        assert hvd.join(process_set=process_set) == process_set.ranks[-1]
        still_works_in(process_set, size)
    still_works()


def still_works_in(process_set: Any, size: int) -> None:
    assert hvd.allgather(torch.ones(1), process_set=process_set).tolist() == [1] * size


def test_a_join_with_any_device_number_without_gpus_works() -> None:
    if torch.cuda.device_count() == 0:
        for device in (hvd.local_rank(), 99, -2):
            assert hvd.join(device) in range(4)


def test_a_join_that_one_rank_must_not_make_fails_on_every_rank() -> None:
    for process_set, rank, size in mine():
        join = partial(hvd.join, process_set=process_set)
        if rank == size - 1:
            refused("hvd.join: device must be a number, got 'cuda:0'", partial(join, "cuda:0"), ValueError)
        else:  # until then it adds zeros
            got = hvd.allreduce(torch.ones(2), name="zeros", op=hvd.Sum, process_set=process_set)
            assert got.tolist() == [size - 1.0] * 2
            refused(f"was refused by rank {process_set.ranks[-1]} (sets.py:", join)
        still_works_in(process_set, size)
        assert join() in process_set.ranks
    still_works()


def test_a_join_with_a_gpu_that_is_not_there_fails_on_every_rank() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        for device in (1, -2):
            if hvd.rank() == 0:
                text = f"hvd.join: device must be -1 or one of 1 GPUs, got {device}"
                refused(text, partial(hvd.join, device), ValueError)
            else:
                refused("was refused by rank 0", hvd.join)
    still_works()


def test_barrier_waits_for_the_slowest() -> None:
    import time

    for process_set, rank, size in mine():
        hvd.barrier(process_set=process_set)
        start = time.monotonic()
        if rank == size - 1:
            time.sleep(0.2)
        hvd.barrier(process_set=process_set)
        assert time.monotonic() - start > 0.15
