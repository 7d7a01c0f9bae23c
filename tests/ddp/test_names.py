"""Methods of torch's DistributedDataParallel with an underscore: what they do here, and which are refused.

Ranks are threads. Names that Lightning and Accelerate read are in test_arguments.py, hooks for buffers in
test_buffers.py.
"""

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from tests.support.models import batches, flat_grads, mlp, seeded, shard, square
from tests.support.ranks import run_ranks
from tests.support.stock import Stock, gloo_group, run_beside, wrap


def gradient(model, comm, batch):
    model.zero_grad()
    square(model(shard(batch, comm))).backward()
    return flat_grads(model)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_another_group_takes_over_and_leaves_a_rank_to_itself(algorithm):
    first, second = batches(2)

    def body(comm, other):
        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm, algorithm=algorithm)
        before = gradient(model, comm, first)
        smaller = gs.comm.split(other, [0, 1])
        model._update_process_group(dist.GroupMember.NON_GROUP_MEMBER if smaller is None else smaller)
        after = gradient(model if smaller is not None else model.module, comm, second)
        model.close()
        return before, after, gradient(model.module, comm, second)

    ranks = run_ranks(3, body, groups=2)
    assert all(torch.equal(before, ranks[0][0]) for before, _, _ in ranks)
    together, alone = [after for _, after, _ in ranks], [own for _, _, own in ranks]
    assert torch.equal(together[0], together[1])
    error = 0.02 if algorithm == "bytegrad" else 1e-6
    torch.testing.assert_close(together[0], (alone[0] + alone[1]) / 2, rtol=error, atol=error)
    assert torch.equal(together[2], alone[2])


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, value):
        return value.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        raise ArithmeticError("in backward")


@pytest.mark.parametrize("fails", [False, True], ids=["", "after a backward that failed"])
def test_gradients_after_each_change_of_the_group_are_those_of_torchs_ddp(fails):
    store = dist.HashStore()

    def body(comm, group):
        pair = gs.comm.split(comm, [0, 1])
        groups = {
            Stock: [gloo_group(store, comm.rank, 2) if pair is not None else None, group],
            gs.DistributedDataParallel: [pair, comm],
        }
        results = []
        for kind in (Stock, gs.DistributedDataParallel):
            model = wrap(kind, seeded(mlp), comm, group, {})
            gradients = [gradient(model, comm, batches(1)[0])]
            if fails and kind is not Stock:  # torch's DDP would keep what the failed backward had added
                with pytest.raises(ArithmeticError):
                    Fails.apply(model(shard(batches(1)[0], comm))).sum().backward()
            for new in groups[kind]:
                model._update_process_group(dist.GroupMember.NON_GROUP_MEMBER if new is None else new)
                assert new is None or model.process_group is new
                if new is not None:
                    gradients.append(gradient(model, comm, batches(1)[0]))
            results.append(gradients)
        return results

    for theirs, ours in run_beside(3, body):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_registered_hook_stays_in_another_group():
    def body(comm, other):
        calls = []

        def hook(state, bucket):
            calls.append(state)
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm)
        model.register_comm_hook("state", hook)
        model._update_process_group(other)
        gradient(model, comm, batches(1)[0])
        assert calls == ["state"]

    run_ranks(2, body, groups=2)


def test_names_without_a_meaning_here_are_refused_with_a_reason_or_do_nothing():
    def body(comm):
        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm)
        model._check_reducer_finalized()
        model._set_ddp_sink_clone(False)
        assert model._distributed_rank == 0
        for call, text in (
            (lambda: model._set_ddp_runtime_logging_sample_rate(5), "takes no times of steps, got 5"),
            (
                lambda: model._register_fused_optim(torch.optim.SGD, lr=0.1),
                r"step after backward\(\) here, got <class",
            ),
            (lambda: model._set_sparse_metadata({}), "sparse gradients are not supported"),
        ):
            with pytest.raises(gs.UsageError, match=text):
                call()

    run_ranks(1, body)
