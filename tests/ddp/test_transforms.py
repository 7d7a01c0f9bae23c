"""torch.func around a wrapper: its transforms see the wrapped model, and buffers are copied outside of them."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.jobs import Job

pytestmark = pytest.mark.usefixtures("job")


@pytest.fixture(scope="module", params=["gossamer", "gloo"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:  # ranks as threads would share torch's level of jvp
    with Job(2) as job, job.within(gs.init, gs.shutdown, backend=request.param):
        yield job


class Net(nn.Module):
    """It has a buffer, which is rank 0's in each forward, and may have a parameter that no forward uses."""

    def __init__(self, factor: float, *, spare: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("factor", torch.full((3,), factor))
        if spare:
            self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * self.factor


X = torch.arange(8.0).view(2, 4) / 8
TRANSFORMS = {
    "jvp": lambda model: torch.func.jvp(model, (X,), (torch.ones_like(X),))[1],
    "vjp": lambda model: torch.func.vjp(model, X)[1](torch.ones(2, 3))[0],
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "jacrev": lambda model: torch.func.jacrev(model)(X),
    "jacfwd": lambda model: torch.func.jacfwd(model)(X),
    "hessian": lambda model: torch.func.hessian(lambda x: model(x).sum())(X),
    "vmap": lambda model: torch.func.vmap(model)(torch.stack([X, X + 1])),
    "functional_call": lambda model: torch.func.grad(
        lambda weights: torch.func.functional_call(model, weights, (X,)).sum()
    )({name: param.detach() for name, param in model.named_parameters()}),
}


def equal(a, b):
    if isinstance(a, dict):  # by parameter; the wrapper's names have a prefix
        return all(torch.allclose(*each) for each in zip(a.values(), b.values(), strict=True))
    return torch.allclose(a, b)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("face", [gs.DataParallel, gs.DistributedDataParallel])
def test_a_transform_of_a_wrapper_is_that_of_its_model_with_rank_0s_buffers(face, name):
    model = face(Net(gs.rank() + 1.0))
    before = TRANSFORMS[name](model)
    model.module.factor.fill_(gs.rank() + 5.0)  # what a forward might do
    after = TRANSFORMS[name](model)
    copied = face is gs.DistributedDataParallel
    assert model.module.factor[0] == (5.0 if copied else gs.rank() + 5.0)
    assert equal(after, TRANSFORMS[name](model.module))
    assert not equal(after, before)
    model(X).sum().backward()  # training goes on
    assert model.module.layer.weight.grad is not None


def test_a_transform_after_a_parameter_was_left_out_says_so_in_torchs_words():
    model = gs.DistributedDataParallel(Net(1.0, spare=True))
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        TRANSFORMS["jvp"](model)
