"""gossamer.bagua: append_asynchronous_model_average_op, and an algorithm that runs it from a thread of its own.

Ranks are threads, and each of them has a thread beside that marks its tensors.
"""

import threading
import time

import pytest
import torch
from torch import nn

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api import tensor as functions
from tests.support.bagua_algorithms import Asynchronous, MeanWeights, Of, Weights, wait_for
from tests.support.models import batches, flat_weights, mlp, relative_error, seeded, shard, square
from tests.support.ranks import run_ranks

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class Sum(nn.Module):
    """Its gradients are all -1, so a step of SGD with lr=1 adds 1 to every weight."""

    def __init__(self, numel=50_000, dtype=torch.float32):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(numel, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(7, 3, dtype=dtype))

    def forward(self):
        return -(self.first.sum() + self.second.sum())


def moved(model, comm):
    """Adds the rank times 4 to this rank's weights, which wrapping has made equal."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(4 * comm.rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_become_the_mean_to_the_bit_when_nobody_trains(size, dtype):
    def body(comm):
        model = seeded(mlp).to(dtype)
        bagua.with_bagua(model, [], Of(Asynchronous), process_group=comm)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(comm.rank + 0.3)
        before = flat_weights(model)
        algorithm = model.bagua_algorithm
        algorithm.begin()
        wait_for(lambda: algorithm.rounds >= 2)
        algorithm.abort(model)
        model.bagua_ddp.close()
        return before, flat_weights(model)

    results = run_ranks(size, body)
    mean = sum(before for before, _ in results) / size
    for _, after in results:
        assert torch.equal(after, results[0][1])
        assert relative_error(after, mean) < 2 * torch.finfo(dtype).eps


class ByHand(Weights):
    """The operation alone: the test marks the tensors."""

    def init_operations(self, bagua_ddp, bucket):
        self.operation = bucket.append_asynchronous_model_average_op(peer_selection_mode="all")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_adds_mean_minus_snapshot_to_what_a_locked_rank_has_become_meanwhile(dtype):
    rank_1_has_the_mean = threading.Event()

    def body(comm):
        model = Sum(11, dtype)
        bagua.with_bagua(model, [], Of(ByHand), process_group=comm)
        moved(model, comm)
        algorithm = model.bagua_algorithm
        if comm.rank == 0:
            algorithm.operation.lock_weight()
        algorithm.mark()
        if comm.rank == 0:
            assert rank_1_has_the_mean.wait(20)  # so all snapshots have been taken
            time.sleep(0.05)
            assert not flat_weights(model).any()  # locked
            with torch.no_grad():
                model.first.add_(16)
            algorithm.operation.unlock_weight()
        model.bagua_ddp.wait_pending_comm_ops()
        if comm.rank == 1:
            rank_1_has_the_mean.set()
        model.bagua_ddp.close()
        return model.first.tolist(), model.second.flatten().tolist()

    results = run_ranks(2, body)
    assert results[0] == ([2.0 + 16] * 11, [2.0] * 21)
    assert results[1] == ([2.0] * 11, [2.0] * 21)


@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_no_step_of_any_rank_is_lost_while_rounds_go_on(size, buckets):
    def body(comm):
        model = Sum()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        bagua.with_bagua(model, [optimizer], Of(Asynchronous, 0, 0.0, buckets), process_group=comm)
        moved(model, comm)
        steps = 0
        while steps < 40 or model.bagua_algorithm.rounds < 8:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            steps += 1
        model.bagua_algorithm.abort(model)
        model.bagua_ddp.close()
        return flat_weights(model), steps + 4 * comm.rank

    results = run_ranks(size, body)
    total = sum(added for _, added in results)
    # Sums of halves and quarters are exact, and rounds do not change the sum over ranks.
    assert torch.equal(sum(weights for weights, _ in results), torch.full_like(results[0][0], total))


@pytest.mark.parametrize("size", [2, 3])
def test_algorithm_with_a_thread_trains_after_its_warm_up_and_resumes_after_abort(size):
    def body(comm):
        model = seeded(mlp, seed=comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        bagua.with_bagua(model, [optimizer], Of(Asynchronous, 3, 0.001), process_group=comm)
        algorithm = model.bagua_algorithm
        losses, weights = [], []
        for step, batch in enumerate(batches(20)):
            optimizer.zero_grad()
            loss = square(model(shard(batch, comm)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step == 2:
                weights.append(flat_weights(model))
            if step in (8, 19):
                wait_for(lambda: algorithm.rounds > 0)
                algorithm.abort(model)
                frozen = flat_weights(model)
                time.sleep(0.02)
                assert torch.equal(frozen, flat_weights(model))
            if step == 8:
                before = algorithm.rounds
                algorithm.resume(model)
                wait_for(lambda before=before: algorithm.rounds >= before + 2)
        model.bagua_ddp.close()
        return losses, weights[0], algorithm.rounds

    results = run_ranks(size, body)
    assert all(torch.equal(weights, results[0][1]) for _, weights, _ in results)  # after the warm-up
    assert len({rounds for *_, rounds in results}) == 1
    assert sum(losses[-1] for losses, *_ in results) < 0.5 * sum(losses[0] for losses, *_ in results)


@pytest.mark.parametrize("size", [2, 4])
def test_rounds_go_on_until_the_last_rank_aborts_and_end_on_all_together(size):
    def body(comm, other):
        model = Sum(10)
        bagua.with_bagua(model, [], Of(Asynchronous), process_group=comm)
        algorithm = model.bagua_algorithm
        algorithm.operations = [
            bucket.clear_ops().append_asynchronous_model_average_op("all", group=other)
            for bucket in model.bagua_buckets
        ]
        for turn in range(3):
            algorithm.resume(model)
            last = turn % size
            if comm.rank == last:
                seen = algorithm.rounds
                wait_for(lambda seen=seen: algorithm.rounds > seen + 3)
                assert all(operation.get_status() for operation in algorithm.operations)
            algorithm.abort(model)
            assert not any(operation.get_status() for operation in algorithm.operations)
        model.bagua_ddp.close()
        return algorithm.rounds

    assert len(set(run_ranks(size, body, groups=2))) == 1


def test_lock_may_be_taken_twice_and_abort_lets_go_of_one_that_no_backward_has():
    def body(comm):
        model = Sum(10)
        bagua.with_bagua(model, [], Of(Asynchronous), process_group=comm)
        moved(model, comm)
        model()
        model()  # a second forward, before any backward
        model.bagua_algorithm.abort(model)
        model.bagua_ddp.close()
        return flat_weights(model)

    results = run_ranks(2, body)
    assert torch.equal(results[0] + results[1], torch.full_like(results[0], 4.0))


def test_close_ends_a_round_that_waits_for_the_lock():
    def body(comm):
        model = Sum(10)
        bagua.with_bagua(model, [], Of(ByHand), process_group=comm)
        model.bagua_algorithm.operation.lock_weight()
        model.bagua_algorithm.mark()
        time.sleep(0.1)
        model.bagua_ddp.close()

    run_ranks(2, body)


def test_failed_round_is_an_error_of_the_next_forward_too():
    def body(comm):
        model = Sum(10)
        bagua.with_bagua(model, [], Of(Asynchronous), process_group=comm)
        algorithm = model.bagua_algorithm
        algorithm.begin()
        wait_for(lambda: algorithm.rounds > 0)
        if comm.rank == 1:
            model.first.data = torch.zeros(10)  # as model.to(...) does
        wait_for(algorithm.loop.done)
        with pytest.raises(gs.GossamerError, match=r"lock_weight: a round of bucket '0' \(2 tensors"):
            model()
        try:
            algorithm.abort(model)
        finally:
            model.bagua_ddp.close()

    lost, moved_away = run_ranks(2, body, errors=True)
    assert isinstance(lost, gs.CommError)
    assert "rank 1/2 step 0 bucket '0' (2 tensors, 124 bytes): Asynchronous raised" in str(moved_away)
    assert "must stay in its flat memory, but they have been moved" in str(moved_away)


class Stray(MeanWeights):
    """Marks some tensors from the thread that trains, and the rest from another thread at any time."""

    def init_forward_pre_hook(self, bagua_ddp):
        return lambda inputs: None

    def init_post_backward_hook(self, bagua_ddp):
        return lambda: None

    def mark_some(self, count):
        for tensor in self.tensors[:count]:
            functions.bagua_mark_communication_ready(tensor)


def test_half_marked_bucket_is_an_error_only_of_the_thread_that_trains():
    def body(comm):
        model = mlp()
        bagua.with_bagua(model, [], Of(Stray), process_group=comm)
        own = threading.Thread(target=model.bagua_algorithm.mark_some, args=(2,))
        own.start()
        own.join()
        square(model(batches(1)[0])).backward()
        model.bagua_algorithm.mark_some(4)
        with pytest.raises(gs.ConfigError, match="at the end of the backward bucket 'all'.*has not begun"):
            square(model(batches(1)[0])).backward()
        first = model.bagua_algorithm.tensors[0]
        mark = first._bagua_registration.mark
        model.bagua_ddp.close()
        with pytest.raises(gs.ConfigError, match="the model of this tensor has ended; end a thread"):
            mark()
        with pytest.raises(gs.ConfigError, match="this is no Bagua tensor"):
            functions.bagua_mark_communication_ready_without_synchronization(first)

    run_ranks(1, body)
