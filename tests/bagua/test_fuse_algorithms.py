# fuse_optimizer with every algorithm: fuse_step() trains as step() does, whether the model is wrapped first or the
# optimizer is fused first, and whether parameters are moved or not. What cannot be fused is refused.

from functools import cache

import pytest
import torch
from torch import nn, optim

import gossamer as gs
from gossamer.algorithms import ALGORITHMS, AsyncModelAverage, LocalSGD
from gossamer.bagua.torch_api import with_bagua
from gossamer.bagua.torch_api.contrib import fuse_optimizer
from gossamer.bagua.torch_api.contrib.fuse.optimizer import is_fused_optimizer
from tests.support.bagua_algorithms import MeanWeights, Of
from tests.support.optimizers import assert_same, runs_of
from tests.support.ranks import run_ranks

STEPS = 6
OWN_OPTIMIZERS = {
    name: kind.optimizer_class for name, kind in ALGORITHMS.items() if kind.optimizer_class is not None
}
ORDERS = {"wrap first": "wrap fuse", "fuse first": "fuse wrap", "wrap after a step": "fuse step wrap"}


def make_algorithm(name: str) -> gs.Algorithm:
    if name == "async":
        return AsyncModelAverage(sync_interval_ms=0)
    return LocalSGD(period=2) if name == "local_sgd" else ALGORITHMS[name]()


def parameters_and_optimizer(comm, name: str, moments: str, **fuse):
    """Parameters and optimizer of this rank after some steps; from step "fuse" on by fuse_step()."""
    generator = torch.Generator().manual_seed(comm.rank)
    # All but the last bias have a multiple of 64 bytes, so they lie in a row in a bucket.
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    for param in model.parameters():
        nn.init.normal_(param, std=0.2, generator=generator)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    algorithm, wrapped = make_algorithm(name), model
    for moment in [*moments.split(), *["step"] * STEPS]:
        if moment == "wrap":
            wrapped = gs.DataParallel(model, optimizer, algorithm=algorithm, process_group=comm)
        elif moment == "fuse":
            fuse_optimizer(optimizer, **fuse)
        else:
            optimizer.zero_grad()
            wrapped(torch.randn(5, 16, generator=generator)).square().mean().backward()
            (optimizer.fuse_step if is_fused_optimizer(optimizer) else optimizer.step)()
            if name == "async" and wrapped is not model:
                algorithm._background.wait()  # each round ends before the next forward, in every run
    wrapped.close()
    return list(model.parameters()), optimizer


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("do_flatten", [True, False], ids=["flatten", "in place"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - set(OWN_OPTIMIZERS)))
def test_fused_steps_train_as_unfused_ones(name, order, do_flatten, ranks) -> None:
    plain = unfused(ranks, name, order)
    fused = run_ranks(
        ranks, lambda comm: parameters_and_optimizer(comm, name, ORDERS[order], do_flatten=do_flatten)
    )
    for one, other in zip(fused, plain, strict=True):
        assert_same(one, other)
    alone = unfused(1, name, order)
    assert not torch.equal(plain[0][0][0], alone[0][0][0]), "the ranks have exchanged nothing"
    if do_flatten:
        assert all(max(runs_of(optimizer)) > 1 for _, optimizer in fused)


@cache
def unfused(ranks: int, name: str, order: str) -> list:
    return run_ranks(
        ranks, lambda comm: parameters_and_optimizer(comm, name, ORDERS[order].replace("fuse", ""))
    )


@pytest.mark.parametrize("name", ["decentralized", "local_sgd"])
def test_a_wrapper_that_holds_the_weights_is_no_error_without_check_flatten(name) -> None:
    results = run_ranks(
        2, lambda comm: parameters_and_optimizer(comm, name, "fuse wrap", check_flatten=False)
    )
    reference = run_ranks(2, lambda comm: parameters_and_optimizer(comm, name, "wrap"))
    for one, other in zip(results, reference, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_an_optimizer_whose_state_an_algorithm_averages_is_refused(name, elementwise) -> None:
    kind = OWN_OPTIMIZERS[name]
    optimizer = ALGORITHMS[name].make_optimizer([nn.Parameter(torch.ones(2))], lr=0.1, warmup_steps=1)
    with pytest.raises(gs.ConfigError, match=rf"averages the state of this {kind.__name__}.*call step\(\)"):
        fuse_optimizer(optimizer, elementwise=elementwise)


@pytest.mark.parametrize("order", ["wrap first", "fuse first"])
def test_weights_of_an_algorithm_in_hooks_stay_in_its_buckets(order) -> None:
    def body(comm, moments):
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        generator = torch.Generator().manual_seed(comm.rank)
        for param in model.parameters():
            nn.init.normal_(param, std=0.2, generator=generator)
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        algorithm = Of(MeanWeights)
        for moment in [*moments.split(), *["step"] * STEPS]:
            if moment == "wrap":
                with_bagua(model, [optimizer], algorithm, comm)
            elif moment == "fuse":
                fuse_optimizer(optimizer)
            else:
                optimizer.zero_grad()
                model(torch.randn(5, 16, generator=generator)).square().mean().backward()
                (optimizer.fuse_step if is_fused_optimizer(optimizer) else optimizer.step)()
        flat = [bucket.flat_memory() is not None for bucket in model.bagua_algorithm.buckets]
        model.bagua_ddp.close()
        return (list(model.parameters()), optimizer), flat

    fused = run_ranks(2, lambda comm: body(comm, ORDERS[order]))
    plain = run_ranks(2, lambda comm: body(comm, "wrap"))
    for (one, flat), (other, _) in zip(fused, plain, strict=True):
        assert_same(one, other)
        assert flat == [True]
