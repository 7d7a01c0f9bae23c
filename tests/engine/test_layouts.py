"""Parameters and buffers whose elements do not lie in memory one by one: they train, or one error names them."""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import seeded, square
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("backend"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:torch.quantize_per_tensor"),
]

WRAPPERS = (gs.DataParallel, gs.DistributedDataParallel)


class With(nn.Module):
    """A layer, and one more tensor `x`, which the output depends on if it is a buffer with plain values."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.layer = seeded(lambda: nn.Linear(4, 3))
        if isinstance(x, nn.Parameter):
            self.x = x
        else:
            self.register_buffer("x", x)
        special = x.is_meta or x.layout != torch.strided or x.is_quantized
        self.uses_x = not (special or isinstance(x, nn.Parameter))

    def forward(self, inputs):
        return self.layer(inputs) + (self.x.abs().sum() if self.uses_x else 0)


def row(rank):
    return torch.full((1,), rank + 1.0).expand(4)


def column(rank):
    return (torch.arange(3.0) + 10 * rank)[:, None].expand(3, 4)


def conjugate(rank):
    return torch.full((3,), 1 + 1j * (rank + 1)).conj()


def negative(rank):
    return torch._neg_view(torch.full((3,), rank + 1.0))


def fill(x, values):
    """Write values in place, also those of an expanded tensor."""
    for dim in range(x.dim()):
        if x.stride(dim) == 0:
            x, values = x.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    x.copy_(values)


def train(model):
    square(model(torch.ones(2, 4))).backward()


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("build", [row, column, conjugate, negative])
def test_buffers_that_are_views_of_another_form_are_copied_and_averaged(build, wrap):
    def body(comm):
        x = build(comm.rank)
        form = x.stride(), x.is_conj(), x.is_neg()
        model = wrap(With(x), process_group=comm)
        seen = [x.clone()]
        if wrap is gs.DistributedDataParallel:
            fill(x, build(comm.rank))  # the next forward copies it
        train(model)
        seen.append(x.clone())
        fill(x, build(comm.rank))
        model.consensus()
        assert model.module.x is x
        assert (x.stride(), x.is_conj(), x.is_neg()) == form
        assert torch.equal(next(value for key, value in model.state_dict().items() if key.endswith("x")), x)
        model.close()
        return seen, x.clone()

    for seen, averaged in run_ranks(2, body):
        assert all(torch.equal(each, build(0)) for each in seen)
        assert torch.equal(averaged, (build(0).clone() + build(1)) / 2)


@pytest.mark.parametrize("build", [row, conjugate])
def test_buffers_that_are_views_of_another_form_are_copied_in_a_join(build):
    def body(comm):
        x = build(comm.rank)
        model = gs.DistributedDataParallel(With(x), process_group=comm)
        with model.join():
            for _ in range(comm.rank + 1):
                fill(x, build(comm.rank))
                train(model)
        return x.clone()

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_buffer_on_meta_has_nothing_to_copy(wrap):
    def body(comm):
        model = wrap(With(torch.zeros(3, device="meta")), process_group=comm)
        train(model)
        model.consensus()
        model.close()
        return model.module.x.is_meta

    assert run_ranks(2, body) == [True, True]


def sparse():
    return torch.eye(3).to_sparse()


def compressed():
    return torch.eye(3).to_sparse_csr()


def quantized():
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def frozen(x):
    return nn.Parameter(x, requires_grad=False)


REFUSED = {
    "sparse buffer": (sparse, "buffer 'x' is sparse_coo"),
    "compressed buffer": (compressed, "buffer 'x' is sparse_csr"),
    "quantized buffer": (quantized, "buffer 'x' is quantized"),
    "sparse": (lambda: nn.Parameter(sparse()), "parameter 'x' is sparse_coo"),
    "compressed": (lambda: frozen(compressed()), "parameter 'x' is sparse_csr"),
    "quantized": (lambda: frozen(quantized()), "parameter 'x' is quantized"),
    "expanded": (lambda: nn.Parameter(row(0)), "parameter 'x' is expanded"),
    "frozen expanded": (lambda: frozen(row(0)), "parameter 'x' is expanded"),
    "conjugate": (lambda: nn.Parameter(conjugate(0)), "parameter 'x' must be float32"),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_travel_is_one_error_with_its_name_on_every_rank(case, wrap):
    build, text = REFUSED[case]
    errors = run_ranks(2, lambda comm: wrap(With(build()), process_group=comm), errors=True)
    assert all(type(error) is gs.ConfigError and text in str(error) for error in errors)
    assert len({str(error) for error in errors}) == 1


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_on_meta_is_an_error_with_its_name(requires_grad):
    def body(comm):
        x = nn.Parameter(torch.zeros(3, device="meta"), requires_grad=requires_grad)
        gs.DataParallel(With(x), process_group=comm)

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "parameter 'x' is on meta" in str(error)


def test_a_frozen_conjugate_parameter_is_copied():
    def body(comm):
        x = frozen(conjugate(comm.rank))
        gs.DataParallel(With(x), process_group=comm).close()
        return x.clone()

    assert all(torch.equal(x, conjugate(0)) for x in run_ranks(2, body))


@pytest.mark.parametrize("build", [sparse, compressed, quantized])
def test_what_cannot_travel_may_stay_if_no_buffer_is_copied(build):
    options = {
        gs.DataParallel: {"broadcast": False},
        gs.DistributedDataParallel: {"broadcast_buffers": False},
    }

    def body(comm):
        for wrap, own in options.items():
            model = wrap(With(build()), process_group=comm, **own)
            train(model)
            with pytest.raises(gs.ConfigError, match="buffer 'x' is"):
                model.consensus()
            model.close()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("builds", "text"),
    [
        ((lambda: row(0), lambda: torch.ones(4)), "'buffer x [4] expanded torch.float32' on rank 0"),
        (
            (lambda: torch.ones(4), lambda: torch.ones(4, device="meta")),
            "'buffer x [4] on meta torch.float32' on rank 1",
        ),
        ((lambda: torch.eye(3), sparse), "'buffer x [3, 3] sparse_coo torch.float32' on rank 1"),
    ],
    ids=["expanded", "meta", "sparse"],
)
def test_ranks_whose_buffers_differ_in_form_are_told_so(builds, text):
    def body(comm):
        gs.DataParallel(With(builds[comm.rank]()), process_group=comm)

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert text in str(error)
