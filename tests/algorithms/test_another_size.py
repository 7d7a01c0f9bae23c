"""A checkpoint of n ranks loads on m ranks, for every algorithm in the name table."""

import copy
import functools

import pytest
import torch

import gossamer as gs
from gossamer.algorithms import ALGORITHMS
from gossamer.engine import Merge
from tests.algorithms.test_contract import NAMES, TIMED, build, optimizer_of, step, whole_state
from tests.support.models import batches, flat_weights, mlp, seeded
from tests.support.ranks import run_ranks

SIZES = [(2, 4), (4, 2), (3, 1), (1, 3)]
FEEDBACK = {
    "gradient_allreduce": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4())),
    "bytegrad": lambda: gs.ByteGrad(codec=gs.ErrorFeedback(gs.Int8())),
    "local_sgd": lambda: gs.LocalSGD(3, codec=gs.ErrorFeedback(gs.Int4()), lockstep=True),
}


def wrap(comm, name, seed=0, algorithm=None, **options):
    module = seeded(mlp, seed)
    optimizer = optimizer_of(name, module.parameters())
    algorithm = algorithm or FEEDBACK.get(name, lambda: build(name))()
    group = options.pop("group", comm)
    return gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=group, **options), optimizer


def state_of(model, optimizer):
    state = {"model": model.state_dict(), "optimizer": whole_state(optimizer)}
    return copy.deepcopy({**state, "algorithm": model.algorithm_state_dict()})


@functools.cache
def saved_by(size, name, steps=8):
    """What each of `size` ranks saves, and the last loss of each."""

    def body(comm):
        model, optimizer = wrap(comm, name)
        losses = [step(model, optimizer, batch, comm) for batch in batches(steps)]
        state = state_of(model, optimizer)
        model.close()
        return state, losses[0]

    return run_ranks(size, body)


def load(model, optimizer, saved):
    own = model.part_of_checkpoint(copy.deepcopy(saved))
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    model.load_algorithm_state_dict(own["algorithm"])
    return own


def unsent(states):
    """What the mean over the ranks still lacks, by parameter name."""
    errors = [state["algorithm"]["fields"].get("error", {}) for state in states]
    names = {name for error in errors for name in error}
    return {name: sum(error[name].double() for error in errors) / len(states) for name in names}


@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_another_number_of_ranks_goes_on_from_the_mean_and_owes_what_was_unsent(name, before, after):
    first = saved_by(before, name)
    saved = [state for state, _ in first]
    mean = {key: sum(state["model"][key].double() for state in saved) / before for key in saved[0]["model"]}

    def body(comm):
        model, optimizer = wrap(comm, name, seed=7, broadcast=False)
        load(model, optimizer, saved)
        loaded = state_of(model, optimizer)
        losses = [step(model, optimizer, batch, comm) for batch in batches(16)[8:]]
        steps = model.engine.optimizer_steps
        equal = flat_weights(model.module)
        model.consensus()
        agreed = flat_weights(model.module)
        model.close()
        return loaded, losses, steps, equal, agreed

    results = run_ranks(after, body)
    loaded = [result[0] for result in results]
    for state in loaded:
        for key, value in mean.items():
            torch.testing.assert_close(state["model"][key].double(), value, rtol=1e-5, atol=1e-6)
            assert torch.equal(state["model"][key], loaded[0]["model"][key])
    owed, kept = unsent(saved), unsent(loaded)
    assert set(owed) <= set(kept)
    for parameter, value in owed.items():
        torch.testing.assert_close(kept[parameter], value, rtol=1e-5, atol=1e-7)
    assert all(steps == 16 for _, _, steps, _, _ in results)
    assert (
        sum(losses[-1] for _, losses, *_ in results) / after < 0.8 * sum(loss for _, loss in first) / before
    )
    for _, _, _, own, agreed in results:
        assert torch.equal(agreed, results[0][4])
        if ALGORITHMS[name].fields != ("weight",) and name not in {*TIMED, "zero_one_adam"}:
            assert torch.equal(own, results[0][3])


@pytest.mark.parametrize(
    "name", ["gradient_allreduce", "qadam", "onebit_adam", "powersgd", "local_sgd", "bytegrad"]
)
def test_something_is_unsent_in_that_test(name):
    owed = unsent([state for state, _ in saved_by(2, name)])
    assert sum(error.norm() for error in owed.values()) > 0


@pytest.mark.parametrize(("before", "after"), [(2, 7), (7, 2)])
def test_the_outer_optimizer_goes_on_although_buckets_are_padded_otherwise(before, after):
    """Two averagings of float64 weights that all ranks change alike: the same as without the change of size."""

    def train(comm, saved=None):
        module = seeded(mlp).double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        outer = functools.partial(torch.optim.Adam, lr=0.05)
        algorithm = gs.LocalSGD(1, outer)
        model = gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=comm, broadcast=False)
        if saved:
            load(model, optimizer, saved)
        given = [batch.double() for batch in batches(4)]
        for batch in given[2:] if saved else given[: 2 if comm.size == before else 4]:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        state = state_of(model, optimizer)
        model.close()
        return state, flat_weights(module), [bucket.numel for bucket in model.engine.buckets]

    first = run_ranks(before, train)
    saved = [state for state, _, _ in first]
    resumed = run_ranks(after, lambda comm: train(comm, saved))
    [(_, whole, _)] = run_ranks(1, train)
    assert first[0][2] != resumed[0][2], "buckets of other sizes"
    for _, weights, _ in resumed:
        torch.testing.assert_close(weights, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hosts", [None, [[0, 1], [2, 3]]], ids=["flat", "by hosts"])
def test_the_next_message_brings_what_other_ranks_have_not_sent(hosts):
    """With gradients of zero, the sum of what arrives is what was owed, up to what is still unsent."""
    saved = [state for state, _ in saved_by(2, "gradient_allreduce")]
    owed = unsent(saved)

    def body(comm):
        group = gs.Hierarchical(comm, hosts) if hosts else comm
        codec = gs.ErrorFeedback(gs.Int4())
        module = seeded(mlp)
        model = gs.DataParallel(module, algorithm=gs.GradientAllReduce(codec=codec), process_group=group)
        model.load_algorithm_state_dict(model.part_of_checkpoint(saved)["algorithm"])
        arrived = {
            name: torch.zeros_like(param, dtype=torch.float64) for name, param in module.named_parameters()
        }
        for _ in range(40):
            module.zero_grad()
            (
                0 * sum(param.sum() for param in module.parameters()) + 0 * model(torch.zeros(1, 10)).sum()
            ).backward()
            for name, param in module.named_parameters():
                arrived[name] += param.grad.double()
        model.close()
        return arrived

    for arrived in run_ranks(4 if hosts else 3, body):
        for name, value in owed.items():
            torch.testing.assert_close(arrived[name], value, rtol=1e-3, atol=1e-7)


def test_one_rank_pays_at_its_next_step_what_three_owed():
    for name in ("gradient_allreduce", "powersgd"):
        saved = [state for state, _ in saved_by(3, name)]
        owed = unsent(saved)

        def body(comm, name=name, saved=saved):
            model, optimizer = wrap(comm, name, broadcast=False)
            load(model, optimizer, saved)
            (0 * model(torch.zeros(1, 10)).sum()).backward()
            grads = {key: param.grad.double() for key, param in model.module.named_parameters()}
            left = unsent([state_of(model, optimizer)])
            model.close()
            return grads, left

        [(grads, left)] = run_ranks(1, body)
        for key, value in owed.items():
            torch.testing.assert_close(grads[key], value, rtol=1e-5, atol=1e-7)
            assert not left[key].any()


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_state_says_what_becomes_of_it(name):
    assert all(isinstance(rule, Merge) for rule in dict(ALGORITHMS[name].state_fields).values())


def test_as_many_ranks_get_what_each_saved():
    saved = [state for state, _ in saved_by(2, "decentralized")]

    def body(comm):
        model, _ = wrap(comm, "decentralized", broadcast=False)
        own = model.part_of_checkpoint(saved)
        model.close()
        return own

    for own, expected in zip(run_ranks(2, body), saved, strict=True):
        assert own["algorithm"] is expected["algorithm"]
        assert own["model"] is expected["model"]


def refusal(name, change, size=3, algorithm=None):
    saved = [state for state, _ in saved_by(2, name)]

    def body(comm):
        model, _ = wrap(comm, name, algorithm=algorithm() if algorithm else None)
        try:
            model.load_algorithm_state_dict(model.part_of_checkpoint(change(saved))["algorithm"])
        finally:
            model.close()

    return [str(error) for error in run_ranks(size, body, errors=True)]


class Silent(gs.GradientAllReduce):
    name = "silent"
    state_fields = ("error",)


def test_states_that_do_not_fit_are_refused_on_every_rank_with_values():
    def other_step(saved):
        second = {**saved[1], "algorithm": {**saved[1]["algorithm"], "optimizer_steps": 9}}
        return [saved[0], second]

    text = "in rank order, got those of rank 1/2, rank 0/2"
    assert all(text in error for error in refusal("qadam", lambda saved: saved[::-1]))
    text = "must have saved the same step, got optimizer_steps 8 of rank 0 and 9 of rank 1"
    assert all(text in error for error in refusal("qadam", other_step))
    text = "got those of rank 0/2"
    assert all(text in error for error in refusal("qadam", lambda saved: saved[:1]))
    text = "Silent must say what becomes of 'error' at another number of ranks"
    errors = refusal("gradient_allreduce", list, algorithm=lambda: Silent(codec=gs.ErrorFeedback(gs.Int4())))
    assert all(text in error for error in errors)


def test_the_state_of_one_rank_alone_is_refused_by_another_number_of_ranks():
    saved = [state for state, _ in saved_by(2, "qadam")]

    def body(comm):
        model, _ = wrap(comm, "qadam")
        try:
            model.load_algorithm_state_dict(saved[0]["algorithm"])
        finally:
            model.close()

    for error in run_ranks(3, body, errors=True):
        assert "got the state of rank 0/2 in a run of 3 ranks" in str(error)
