"""The caller's code in the backend's threads: callbacks of futures, and writes to tensors of inference mode."""

import threading

import pytest
import torch
import torch.distributed as dist

from tests.backend.jobs import TESTED, make_backend, run_group, values
from tests.support.ranks import run_threads

no_gloo = pytest.mark.skipif(
    TESTED == "gloo", reason="Gloo's messages have no futures, its threads no inference mode"
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wait", ["work", "future"])
def test_a_callback_may_wait_for_another_operation_of_its_group(wait):
    def body(group):
        first, second = torch.ones(2), torch.ones(3)

        def then(future: torch.futures.Future) -> list:
            work = group.allreduce([second])
            return work.get_future().wait() if wait == "future" else [work.wait()]

        group.allreduce([first]).get_future().then(then).wait()
        return first.tolist() + second.tolist()

    assert run_group(2, body) == [[2.0] * 5] * 2


@pytest.mark.timeout(60)
@no_gloo
def test_callbacks_that_wait_may_be_nested():
    def body(group):
        def nested(depth: int) -> float:
            tensor = torch.ones(1)
            future = group.allreduce([tensor]).get_future()
            if depth == 0:
                return future.wait()[0].item()
            return future.then(lambda f: f.value()[0].item() + nested(depth - 1)).wait()

        return nested(4)

    assert run_group(2, body) == [10.0] * 2


@pytest.mark.timeout(60)
@no_gloo
def test_a_callback_may_hold_the_last_reference_to_its_backend():
    store = dist.HashStore()
    tensors = [torch.ones(2), torch.ones(2)]

    def body(rank: int) -> bool:
        done = threading.Event()
        holder = [make_backend(TESTED, store, rank, 2)]

        def forget(future: torch.futures.Future) -> None:
            everyone.wait(20)
            holder.clear()
            done.set()

        holder[0].allreduce([tensors[rank]]).get_future().then(forget)
        return done.wait(20)

    everyone = threading.Barrier(2)
    assert run_threads(2, body) == [True, True]
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0]] * 2


@pytest.mark.timeout(60)
@no_gloo
def test_a_shutdown_ends_a_loop_of_receives():
    def body(group):
        def again(future: torch.futures.Future | None) -> None:
            group.recv([torch.ones(1)], 1 - group.rank(), 0).get_future().then(again)

        again(None)
        group.barrier().wait()
        finished = threading.Thread(target=group.shutdown)
        finished.start()
        finished.join(10)
        return finished.is_alive()

    assert run_group(2, body) == [False, False]


@no_gloo
def test_strided_tensors_of_inference_mode_are_written():
    def body(group):
        rank, mine = group.rank(), torch.arange(12.0).view(4, 3)
        with torch.inference_mode():
            tensors = [values(key + rank, (4, 3))[:, :2] for key in (0, 10)]
            contiguous = [tensor.contiguous() for tensor in tensors]
            given = tensors if rank == 0 else contiguous
            work = group.allreduce_coalesced(given)
            work.wait()
            received = torch.zeros(4, 3)[:, 1]
            message = group.recv([received], 0, 0) if rank else group.send([mine[:, 1].contiguous()], 1, 0)
            message.wait()
        last = torch.ones(1)
        group.allreduce([last]).wait()
        wanted = [sum(values(key + r, (4, 3))[:, :2] for r in range(2)) for key in (0, 10)]
        assert all(torch.equal(got, want) for got, want in zip(given, wanted, strict=True))
        assert rank == 0 or torch.equal(received, mine[:, 1])
        return last.item()

    assert run_group(2, body) == [2.0, 2.0]


@pytest.mark.timeout(60)
def test_messages_go_while_the_first_sparse_sum_waits_for_a_rank():
    def body(group):
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[group.rank()]]), torch.ones(1), (2,), check_invariants=True
        )
        message = torch.full((2,), 7.0)
        if group.rank() == 0:
            work = group.allreduce([sparse])
            group.send([message], 1, 0).wait()
            work.wait()
        else:
            message.zero_()
            group.recv([message], 0, 0).wait()
            work = group.allreduce([sparse])
            work.wait()
        return message.tolist() + sparse.to_dense().tolist()

    assert run_group(2, body, timeout_s=20) == [[7.0, 7.0, 1.0, 1.0]] * 2
