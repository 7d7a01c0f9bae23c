# Hooks for stock torch DDP with codecs and dtypes of the user's choice, and around other hooks. Ranks are threads.

import pytest
import torch

import gossamer as gs
from gossamer import hooks
from tests.support.models import batches, flat_grads, flat_weights, mlp, relative_error, seeded, shard, square
from tests.support.stock_ddp import Training, run_ddp


def test_adaptive_sends_what_it_chooses_for_each_parameter():
    rules = gs.Adaptive(gs.ErrorFeedback(gs.Int4()), {"*.bias": None}, tiny=0)

    def body(group, comm):
        training = Training(group, comm, hooks.compress, codec=rules)
        training.run()
        errors = training.state.state_dict()["errors"]
        training.state.close()
        return errors, flat_weights(training.model)

    for errors, weights in run_ddp(2, body):
        assert set(errors) == {name for name, _ in mlp().named_parameters() if name.endswith("weight")}
        assert torch.isfinite(weights).all()


def test_codec_written_in_python_works_with_error_feedback():
    def body(group, comm):
        training = Training(group, comm, hooks.compress, codec=gs.ErrorFeedback(gs.TopK(0.2)), native=True)
        before = flat_weights(training.model)
        weights = training.run()
        training.state.close()
        return relative_error(weights, before), weights

    moved, weights = zip(*run_ddp(2, body), strict=True)
    assert moved[0] > 0.01
    assert torch.equal(*weights)


def test_stochastic_rounding_draws_new_numbers_in_every_step():
    def body(group, comm):
        training = Training(group, comm, hooks.compress, codec=gs.Int4(stochastic=True))
        grads = []
        for _ in range(2):
            training.model.zero_grad()
            square(training.ddp(shard(batches(1)[0], comm))).backward()
            grads.append(flat_grads(training.model))
        training.state.close()
        return grads

    for first, second in run_ddp(2, body):
        assert not torch.equal(first, second)


@pytest.mark.parametrize("wrapper", [hooks.bf16_wrapper, hooks.fp16_wrapper])
def test_wrapper_gives_the_inner_hook_16_bits_and_the_gradients_their_own_dtype(wrapper):
    seen = []

    def inner(state, bucket):
        seen.append(bucket.buffer().dtype)
        return hooks.deterministic(state, bucket)

    def body(group, comm):
        training = Training(group, comm, wrapper(inner))
        training.ddp(shard(batches(1)[0], comm)).square().mean().backward()
        training.state.close()
        assert all(param.grad.dtype == torch.float32 for param in training.model.parameters())
        return flat_grads(training.model)

    alone = seeded(mlp)
    square(alone(batches(1)[0])).backward()
    grads = run_ddp(2, body)
    assert torch.equal(*grads)
    assert 1e-6 < relative_error(grads[0], flat_grads(alone)) < 0.01
    assert {dtype.itemsize for dtype in seen} == {2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_averaged_too(dtype):
    def body(group, comm):
        training = Training(group, comm, hooks.int8, build=lambda: mlp().to(dtype))
        training.ddp(shard(batches(1)[0], comm).to(dtype)).square().mean().backward()
        errors = training.state.state_dict()["errors"]
        training.state.close()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert {error.dtype for error in errors.values()} == {wide}
        return flat_grads(training.model)

    alone = seeded(lambda: mlp().to(dtype))
    square(alone(batches(1)[0].to(dtype))).backward()
    grads = run_ddp(2, body)
    assert torch.equal(*grads)
    assert relative_error(grads[0], flat_grads(alone)) < 0.03
