"""Methods of torch's DistributedDataParallel with an underscore: what they do here, and which are refused.

Ranks are threads. Names that Lightning and Accelerate read are in test_ddp_arguments.py, hooks for buffers in
test_ddp_buffers.py.
"""

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from models import batches, flat_grads, mlp, seeded, shard, square
from ranks import run_ranks


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
