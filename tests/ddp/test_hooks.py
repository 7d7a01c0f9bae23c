"""gs.DistributedDataParallel: torch's communication hooks, unchanged, give the weights that they give torch's DDP.

Ranks are threads, two of them, so sums have one order. The hooks use a torch process group of their own. PowerSGD
seeds the generator that threads share, so it is in test_processes.py.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.nn.parallel import DistributedDataParallel as Stock

import gossamer as gs
from tests.support.models import (
    batches,
    flat_grads,
    flat_weights,
    mlp,
    relative_error,
    seeded,
    shard,
    shards,
    square,
    trained,
)
from tests.support.ranks import run_ranks
from tests.support.stock import gloo_group, run_beside, wrap


def no_powers(group):
    return powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=10**6)


def local(group):
    return post_localSGD_hook.PostLocalSGDState(
        group, group, start_localSGD_iter=2, post_local_gradient_allreduce=False
    )


def same(group):
    return group


def none(group):
    return None


HOOKS = {
    "allreduce": (same, default_hooks.allreduce_hook),
    "fp16": (same, default_hooks.fp16_compress_hook),
    "fp16 wrapper": (same, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16": (same, default_hooks.bf16_compress_hook),
    "bf16 wrapper": (same, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "powerSGD, nothing to compress": (no_powers, powerSGD_hook.powerSGD_hook),
    "post-local SGD": (local, post_localSGD_hook.post_localSGD_hook),
    "noop": (none, debugging_hooks.noop_hook),
}
# On a CPU torch's DDP refuses them: "BF16 all reduce communication hook required CUDA 11+".
CUDA_ONLY = ("bf16", "bf16 wrapper")


def after_five_steps(model, comm):
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), shards(5, comm))


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_torchs_gives_the_weights_it_gives_torchs_ddp(name):
    make_state, hook = HOOKS[name]

    def body(comm, group):
        weights = []
        for kind in (Stock, gs.DistributedDataParallel):
            model = wrap(kind, seeded(mlp), comm, group, {})
            if kind is gs.DistributedDataParallel or name not in CUDA_ONLY:
                model.register_comm_hook(make_state(group), hook)
            weights.append(after_five_steps(model, comm))
        return weights

    ranks = run_beside(2, body)
    for theirs, ours in ranks:
        if name in CUDA_ONLY:
            assert 0 < relative_error(ours, theirs) < 0.01  # what torch's DDP makes without a hook
        else:
            assert torch.equal(theirs, ours)
    assert torch.equal(ranks[0][1], ranks[1][1]) == (name not in ("noop", "post-local SGD"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_optimizer_that_steps_in_the_hook():
    from torch.distributed.optim import as_functional_optim  # compiles optimizers as it is imported

    def body(comm, group):
        weights = []
        for kind in (Stock, gs.DistributedDataParallel):
            model = wrap(kind, seeded(mlp), comm, group, {})
            state = _OptimizerHookState(as_functional_optim(torch.optim.SGD, 0.1))
            model.register_comm_hook(group, _hook_then_optimizer(default_hooks.allreduce_hook, state))
            for batch in batches(3):
                square(model(shard(batch, comm))).backward()
                model.zero_grad()
            weights.append(flat_weights(model))
        return weights

    for theirs, ours in run_beside(2, body):
        assert torch.equal(theirs, ours)
        assert not torch.equal(ours, flat_weights(seeded(mlp)))


def batched(group):
    return powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, use_error_feedback=False)


@pytest.mark.parametrize(
    ("make_state", "hook"),
    [
        (batched, powerSGD_hook.batched_powerSGD_hook),
        (same, quantization_hooks.quantization_pertensor_hook),
        (same, quantization_hooks.quantization_perchannel_hook),
    ],
    ids=["batched powerSGD", "by tensor", "by channel"],
)
def test_a_hook_that_fails_on_gloo_under_torchs_ddp_fails_alike_and_loses_no_rank(make_state, hook):
    def body(comm, group):
        errors = []
        for kind in (Stock, gs.DistributedDataParallel):
            model = wrap(kind, seeded(mlp), comm, group, {})
            model.register_comm_hook(make_state(group), hook)
            errors.append(None)
            try:
                after_five_steps(model, comm)
            except Exception as error:
                errors[-1] = error
        return errors

    for theirs, ours in run_beside(2, body):
        if theirs is None:
            pytest.skip("this torch's hook does not fail under torch's DDP")
        assert ours is not None
        assert type(ours.__cause__) is type(theirs)
        assert str(ours.__cause__).splitlines()[:1] == str(theirs).splitlines()[:1]


def test_hooks_are_registered_by_torchs_enum():
    def body(comm, group):
        weights = []
        for kind in (Stock, gs.DistributedDataParallel):
            model = wrap(kind, seeded(mlp), comm, group, {})
            register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model, group)
            weights.append(after_five_steps(model, comm))
        return weights

    for theirs, ours in run_beside(2, body):
        assert torch.equal(theirs, ours)


def test_a_hook_gets_real_buckets_without_padding_in_order_and_one_that_is_last():
    seen = []

    def note(state, bucket):
        assert type(bucket) is dist.GradBucket
        grads, params = bucket.gradients(), bucket.parameters()
        assert [grad.shape for grad in grads] == [param.shape for param in params]
        assert sum(param.numel() for param in params) == bucket.buffer().numel()
        assert torch.equal(torch.cat([grad.flatten() for grad in grads]), bucket.buffer())
        seen.append((bucket.index(), bucket.is_last(), [grad.clone() for grad in grads]))
        bucket.set_buffer(bucket.buffer() * 3)
        return debugging_hooks.noop_hook(None, bucket)

    def body(comm):
        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm, bucket_cap_mb=0.0005)
        model.register_comm_hook(None, note)
        square(model(batches(1)[0])).backward()
        assert model._get_ddp_logging_data()["comm_hook"].endswith("note")
        model.close()
        return flat_grads(model)

    (grads,) = run_ranks(1, body)
    alone = seeded(mlp)
    square(alone(batches(1)[0])).backward()
    torch.testing.assert_close(grads, 3 * flat_grads(alone))
    assert [(index, last) for index, last, _ in seen] == [(0, False), (1, True)]


@pytest.mark.parametrize(
    "kind", [dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS], ids=str
)
def test_torchs_built_in_hooks(kind):
    def body(comm, group):
        weights = []
        for each in (Stock, gs.DistributedDataParallel):
            model = wrap(each, seeded(mlp), comm, group, {})
            model._register_builtin_comm_hook(kind)
            weights.append(after_five_steps(model, comm))
        return weights

    for theirs, ours in run_beside(2, body):
        assert relative_error(ours, theirs) < (1e-3 if kind.name == "FP16_COMPRESS" else 1e-7)


def test_what_is_no_hook_is_refused_and_a_second_one():
    def body(comm, group):
        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm)
        with pytest.raises(gs.ConfigError, match="hook must be callable, got 3"):
            model.register_comm_hook(None, 3)
        with pytest.raises(gs.ConfigError, match="must be ALLREDUCE or FP16_COMPRESS, got 3"):
            model._register_builtin_comm_hook(3)
        model.register_comm_hook(group, partial(default_hooks.allreduce_hook))
        with pytest.raises(RuntimeError, match=r"can only be called once"):
            model.register_comm_hook(group, default_hooks.allreduce_hook)
        after_five_steps(model, comm)
        model.close()

    run_beside(2, body)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda bucket: bucket.buffer(), "must return a torch.futures.Future, got tensor"),
        (lambda bucket: done(torch.ones(3)), r"must hold one tensor of 461 elements, got \(3,\)"),
        (lambda bucket: done("x"), "must hold one tensor of 461 elements, got 'x'"),
    ],
    ids=["no future", "another size", "no tensor"],
)
def test_a_hook_that_returns_something_else_is_an_error(value, text):
    def body(comm):
        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm)
        model.register_comm_hook(None, lambda state, bucket: value(bucket))
        with pytest.raises(gs.ConfigError, match=text):
            square(model(batches(1)[0])).backward()
        model.close()

    run_ranks(1, body)


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def test_a_hook_is_given_zeros_on_a_rank_without_batches():
    store = dist.HashStore()

    def body(comm):
        group = gloo_group(store, comm.rank, comm.size)
        model = gs.DistributedDataParallel(seeded(mlp), process_group=comm)
        model.register_comm_hook(group, default_hooks.allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for batch in batches(1 + comm.rank):
                optimizer.zero_grad()
                square(model(batch)).backward()
                optimizer.step()
        model.close()
        return flat_weights(model)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)
    assert not torch.equal(first, flat_weights(seeded(mlp)))
