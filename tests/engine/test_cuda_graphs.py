"""Why a CUDA graph cannot hold a step is known without a GPU. Capture and replay: tests/gpu/test_symmetric.py."""

import copy

import pytest
import torch

import gossamer as gs
from tests.support import ranks
from tests.support.models import mlp, seeded


@pytest.fixture(autouse=True)
def _gossamer():
    ranks.choose_backend("gossamer")
    yield
    ranks.choose_backend("gloo")


def refusal(group, **options):
    """Why a graph cannot hold a step of a model that has trained two steps; "" if it can."""
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = gs.DataParallel(model, optimizer, process_group=group, **options)
    first = wrapped.engine.native.capture_refusal()
    for _ in range(2):
        wrapped(torch.ones(2, 10)).square().mean().backward()
        optimizer.step()
    wrapped.engine.native.check_capture()  # nothing is captured
    second = wrapped.engine.native.capture_refusal()
    wrapped.close()
    return first, second


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"algorithm": "bytegrad"}, ""),
        ({"algorithm": gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4()))}, ""),
        (
            {"algorithm": gs.GradientAllReduce(codec=gs.Int8(stochastic=True))},
            "same random numbers in every replay",
        ),
        ({"algorithm": gs.GradientAllReduce(codec=gs.TopK(0.5))}, "decides on the host"),
        ({"algorithm": gs.PowerSGD(rank=1)}, "decides on the host"),
        ({"autotune": gs.Autotune(bucket_bytes=[1000, 3000])}, "autotune is still measuring"),
    ],
    ids=str,
)
def test_an_engine_says_what_a_graph_cannot_hold(options, reason):
    def body(comm):
        return refusal(gs.Symmetric(comm), **copy.deepcopy(options))

    for first, second in ranks.run_ranks(2, body):
        assert "first one makes the buckets anew" in first or (reason and reason in first)
        assert second == reason or (reason and reason in second)


def test_a_group_that_goes_through_the_host_cannot_be_captured():
    ranks.choose_backend("gloo")
    for reasons in ranks.run_ranks(2, refusal):
        for reason in reasons:
            assert "uses 'gloo'" in reason
            assert "gs.Symmetric()" in reason
