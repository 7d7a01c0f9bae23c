"""Settings that cannot work, steps of several optimizers, states that do not fit."""

import pytest
import torch

import gossamer as gs
from tests.support.models import batches, flat_weights, mlp, seeded, shard, square
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap

# --- arguments ---


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: gs.Decentralized(interval=0), "interval must be a positive number of steps, got 0"),
        (lambda: gs.Decentralized("star"), "star"),
        (lambda: gs.LowPrecisionDecentralized(gamma=1.5), "gamma must be above 0 and at most 1, got 1.5"),
        (lambda: gs.LowPrecisionDecentralized("int8"), "codec must be a Codec or None, got 'int8'"),
        (lambda: gs.LowPrecisionDecentralized(gs.ErrorFeedback(gs.Int8())), "must round to nearest"),
        (lambda: gs.LocalSGD(0), "period must be a positive number of steps, got 0"),
        (lambda: gs.LocalSGD(4, fragments=5), "fragments must be 1 to the period, 4, got 5"),
        (lambda: gs.LocalSGD(4, delay=4), "delay must be 0 to less than the period, 4, got 4"),
        (lambda: gs.LocalSGD(4, merge=0), "merge must be above 0 and at most 1, got 0"),
        (lambda: gs.PowerSGD(0), "rank must be a positive integer, got 0"),
        (lambda: gs.PowerSGD(start_step=-1), "start_step must be a number of steps, got -1"),
        (lambda: gs.AsyncModelAverage(-1), "sync_interval_ms must not be negative, got -1"),
        (lambda: gs.AsyncModelAverage(warmup_steps=1.5), "warmup_steps must be a number of steps, got 1.5"),
        (lambda: gs.QAdam("int8"), "codec must be a Codec or None, got 'int8'"),
        (
            lambda: gs.QAdamOptimizer([torch.zeros(1)], warmup_steps=0),
            "warmup_steps must be a positive integer, got 0",
        ),
        (
            lambda: gs.QAdamOptimizer([torch.zeros(1)], betas=(0.9, 1.0)),
            "betas must be at least 0 and below 1",
        ),
        (lambda: gs.QAdamOptimizer([torch.zeros(1)], lr=-1.0), "must not be negative, got -1.0"),
        (lambda: gs.ZeroOneAdam("onebit"), "codec must be a Codec or None, got 'onebit'"),
        (
            lambda: gs.ZeroOneAdam(double_every=0),
            "ZeroOneAdam: double_every must be a positive integer, got 0",
        ),
        (lambda: gs.ZeroOneAdam(longest=2.5), "longest must be a positive integer, got 2.5"),
        (
            lambda: gs.ZeroOneAdamOptimizer([torch.zeros(1)], freeze_steps=0),
            "freeze_steps must be a positive integer, got 0",
        ),
        (
            lambda: gs.ZeroOneAdamOptimizer([torch.zeros(1)], variance_scaler=0),
            "variance_scaler must be a positive integer, got 0",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_values(build, message):
    with pytest.raises(gs.ConfigError, match=message.replace("(", r"\(")):
        build()


def test_wrapping_without_the_optimizer_that_an_algorithm_needs_is_refused():
    def body(comm):
        with pytest.raises(gs.ConfigError, match="counts optimizer steps; give the optimizer"):
            gs.DataParallel(mlp(), algorithm="decentralized", process_group=comm)
        model = mlp()
        adam = torch.optim.Adam(model.parameters())
        with pytest.raises(gs.ConfigError, match=r"must be one QAdamOptimizer, got \['Adam'\]"):
            gs.DataParallel(model, adam, algorithm="qadam", process_group=comm)
        with pytest.raises(gs.ConfigError, match=r"must be one ZeroOneAdamOptimizer, got \['Adam'\]"):
            gs.DataParallel(model, adam, algorithm="zero_one_adam", process_group=comm)
        some = gs.QAdamOptimizer(list(model.parameters())[:2])
        with pytest.raises(gs.ConfigError, match=r"parameter '.*' is not in the optimizer"):
            gs.DataParallel(model, some, algorithm="qadam", process_group=comm)
        some = gs.ZeroOneAdamOptimizer(list(model.parameters())[:2])
        with pytest.raises(gs.ConfigError, match=r"ZeroOneAdam: parameter '.*' is not in the optimizer"):
            gs.DataParallel(model, some, algorithm="zero_one_adam", process_group=comm)
        with pytest.raises(gs.ConfigError, match="9 fragments need as many buckets, got 3"):
            wrap(comm, gs.LocalSGD(9, fragments=9))

    run_ranks(1, body)


def test_an_algorithm_object_serves_one_model_at_a_time():
    def body(comm, other):
        algorithm = gs.AsyncModelAverage()
        with pytest.raises(gs.ConfigError, match="no model is wrapped"):
            algorithm.abort()
        model, _ = wrap(comm, algorithm)
        with pytest.raises(gs.ConfigError, match="this object serves another wrapped model"):
            wrap(other, algorithm)
        model.close()
        model, optimizer = wrap(other, algorithm)
        step(model, optimizer, batches(1)[0])
        model.close()

    run_ranks(1, body, groups=2)


def test_a_step_is_over_when_every_optimizer_has_stepped():
    def body(comm):
        module = seeded(mlp)
        params = list(module.parameters())
        optimizers = [torch.optim.SGD(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)]
        model = gs.DataParallel(module, optimizers, algorithm="decentralized", process_group=comm)
        counts = []
        for batch in batches(3):
            square(model(shard(batch, comm))).backward()
            for optimizer in optimizers:
                optimizer.step()
                counts.append(model.engine.optimizer_steps)
        model.close()
        return counts

    assert run_ranks(2, body) == [[0, 1, 1, 2, 2, 3]] * 2


def test_a_state_of_another_model_or_step_is_an_error_on_every_rank():
    def body(comm):
        model, optimizer = wrap(comm, "decentralized")
        step(model, optimizer, batches(1)[0])
        state = model.algorithm_state_dict()
        with pytest.raises(gs.ConfigError, match="the loaded state differs between ranks"):
            model.load_algorithm_state_dict({**state, "optimizer_steps": 1 + comm.rank})
        with pytest.raises(gs.ConfigError, match=r"unknown parameters \['other'\]"):
            model.load_algorithm_state_dict({**state, "plan": [["other"]]})
        with pytest.raises(gs.ConfigError, match="must be given what state_dict"):
            model.load_algorithm_state_dict({})
        model.load_algorithm_state_dict(state)
        step(model, optimizer, batches(1)[0])
        model.close()

    run_ranks(2, body)


@pytest.mark.parametrize("closed_after", [2, 8])
@pytest.mark.parametrize(
    ("algorithm", "make"),
    [
        (gs.QAdam, lambda params: gs.QAdamOptimizer(params, lr=0.01, warmup_steps=5)),
        (
            gs.ZeroOneAdam,
            lambda params: gs.ZeroOneAdamOptimizer(params, lr=0.01, freeze_steps=9, variance_scaler=2),
        ),
    ],
)
def test_an_optimizer_goes_on_alone_when_its_wrapper_is_closed(algorithm, make, closed_after):
    """It steps as if there had been no wrapper, because one rank's averages are its own values."""

    def body(comm):
        trained = []
        for wrapped in (True, False):
            model = seeded(mlp)
            optimizer = make(model.parameters())
            if wrapped:
                wrapper = gs.DataParallel(model, optimizer, algorithm=algorithm(), process_group=comm)
            for number, batch in enumerate(batches(14)):
                if wrapped and number == closed_after:
                    wrapper.close()
                step(wrapper if wrapped and number < closed_after else model, optimizer, batch)
            trained.append(flat_weights(model))
        return torch.allclose(*trained, rtol=1e-5, atol=1e-6)  # 0/1 Adam sums its updates apart

    assert run_ranks(1, body) == [True]
