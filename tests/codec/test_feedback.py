"""Error feedback, TopK, and the choice of a codec by parameter."""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import batches, mlp, relative_error, seeded, shard, square, train
from tests.support.ranks import run_ranks

FEW_BITS = [gs.TopK(0.05), gs.Int8(32), gs.MinMaxUInt8(), gs.Int4(), gs.OneBit(), gs.Int4(stochastic=True)]
FEW_BITS.append(gs.ChunkTopK(96, 9))


def heavy(rank, numel=4000):
    """Heavy-tailed values whose scale changes along the vector, as gradients' do."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator) / torch.rand(numel, generator=generator).clamp(min=0.05)
    return values * torch.linspace(-3, 3, numel).exp()


@pytest.mark.parametrize("codec", FEW_BITS, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_left_out_of_one_mean_arrives_with_later_ones(codec, size):
    rounds = 60

    def body(comm):
        x = heavy(comm.rank)
        error, once, total = torch.zeros_like(x), None, torch.zeros_like(x)
        for number in range(rounds):
            out = gs.all_reduce(x.clone(), op="mean", codec=gs.ErrorFeedback(codec), error=error, group=comm)
            once = out if number == 0 else once
            total += out
        return once, total / rounds, error

    expected = sum(heavy(rank) for rank in range(size)) / size
    results = run_ranks(size, body)
    for once, mean, _ in results:
        assert torch.equal(mean, results[0][1])
        assert relative_error(mean, expected) < relative_error(once, expected) / (
            2 if codec == gs.OneBit() else 5
        )
    # Nothing is lost: the errors of the ranks hold what has not arrived yet.
    left_out = sum(error for _, _, error in results) / size / rounds
    torch.testing.assert_close(
        results[0][1] + left_out, expected, rtol=1e-4, atol=1e-4 * expected.abs().max()
    )


def test_an_error_that_is_missing_superfluous_or_of_another_shape_is_refused():
    def body(comm):
        x = torch.zeros(8)
        with pytest.raises(gs.ConfigError, match="needs error"):
            gs.all_reduce(x, codec=gs.ErrorFeedback(gs.Int8()), group=comm)
        with pytest.raises(gs.ConfigError, match="error is for a codec with error feedback"):
            gs.all_reduce(x, codec=gs.Int8(), error=x, group=comm)
        for wrong in (torch.zeros(7), torch.zeros(8, dtype=torch.float64)):
            with pytest.raises(gs.ConfigError, match="error must be contiguous"):
                gs.all_reduce(x, codec=gs.ErrorFeedback(gs.Int8()), error=wrong, group=comm)
        with pytest.raises(gs.CodecError, match="without error feedback"):
            gs.ErrorFeedback(gs.ErrorFeedback(gs.Int8()))

    run_ranks(1, body)


def test_a_nan_of_one_step_does_not_stay_in_the_error():
    def body(comm):
        x, error = heavy(comm.rank), torch.zeros(4000)
        broken = x.clone()
        broken[70] = float("nan")
        codec = gs.ErrorFeedback(gs.Int8(32))
        seen = gs.all_reduce(broken, codec=codec, error=error, group=comm)
        after = gs.all_reduce(x, codec=codec, error=error, group=comm)
        return seen, after

    for seen, after in run_ranks(2, body):
        assert not torch.isfinite(seen[70])
        assert torch.isfinite(after).all()


class Pick(gs.Codec):
    """OneBit, in Python."""

    block = 128

    def wire_bytes(self, numel, dtype=torch.float32):
        return gs.OneBit().wire_bytes(numel, dtype)

    def encode(self, x):
        return gs.OneBit().encode(x)

    def decode(self, wire, out):
        return gs.OneBit().decode(wire, out)


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 20, bias=False), nn.Linear(10, 20, bias=False)

    def forward(self, x, parts):
        return sum(getattr(self, part)(x).square().mean() for part in parts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.OneBit())),
        lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(Pick())),
        lambda: gs.PowerSGD(rank=1, start_step=0),
    ],
    ids=["native", "python", "powersgd"],
)
def test_the_error_of_a_parameter_waits_while_no_rank_uses_it(make):
    def body(comm):
        module = seeded(TwoParts)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        model = gs.DataParallel(module, optimizer, algorithm=make(), process_group=comm)
        x = torch.randn(6, 10, generator=torch.Generator().manual_seed(comm.rank))
        exact = seeded(TwoParts)
        exact(x, ["second"]).backward()
        wanted = exact.second.weight.grad.clone()
        gs.all_reduce(wanted, op="mean", group=comm)
        total, count = torch.zeros_like(wanted), 0
        for number in range(9):
            model.zero_grad()
            used = number % 3 == 0  # by all ranks or none
            model(x, ["first", "second"] if used else ["first"]).backward()
            assert (module.second.weight.grad is not None) == used
            if used:
                total, count = total + module.second.weight.grad, count + 1
        left = model.algorithm_state_dict()["fields"]["error"]["second.weight"].clone()
        gs.all_reduce(left, op="mean", group=comm)
        assert left.abs().max() > 0.01 * wanted.abs().max()
        torch.testing.assert_close(total + left, count * wanted, rtol=1e-4, atol=1e-5)

    run_ranks(2, body)


def test_error_feedback_brings_a_sparse_codec_to_the_weights_of_exact_averaging():
    exact = run_ranks(2, lambda comm: train(comm, algorithm="gradient_allreduce", steps=60))[0]

    def error_of(codec):
        found = run_ranks(2, lambda comm: train(comm, algorithm=gs.GradientAllReduce(codec=codec), steps=60))
        assert torch.equal(found[0], found[1])
        return relative_error(found[0], exact)

    assert error_of(gs.ErrorFeedback(gs.TopK(0.1))) < error_of(gs.TopK(0.1)) / 2


@pytest.mark.parametrize("numel", [1, 7, 100, 1021])
def test_topk_keeps_the_largest_and_zeroes_the_rest(numel):
    x = torch.stack([heavy(row, numel) for row in range(3)])
    codec = gs.TopK(0.1)
    wire = codec.encode(x)
    count = max(1, round(0.1 * numel))
    assert wire.shape == (3, codec.wire_bytes(numel)) == (3, 8 * count)
    out = codec.decode(wire, torch.empty_like(x))
    assert ((out == x) | (out == 0)).all()
    assert ((out != 0).sum(dim=1) == count).all()
    kept, lost = out.abs().masked_fill(out == 0, float("inf")).amin(1), (x - out).abs().amax(1)
    assert (kept >= lost).all()


@pytest.mark.parametrize("density", [0, -1, 1.5, float("nan"), "0.1"])
def test_topk_refuses_a_density_that_is_no_share(density):
    with pytest.raises(gs.CodecError, match="density must be above 0"):
        gs.TopK(density)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(10, 60), nn.Linear(60, 60), nn.Linear(60, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.tanh(self.embed(x)))))


def chosen(adaptive):
    return {name: adaptive.choose(name, param) for name, param in Named().named_parameters()}


def test_adaptive_sends_vectors_and_tiny_tensors_exactly_below_8_bits_only():
    sparse, int8 = gs.ErrorFeedback(gs.TopK(0.01)), gs.Int8()
    few = chosen(gs.Adaptive(sparse))
    assert few == {
        "embed.weight": None,  # 600 elements
        "embed.bias": None,
        "body.weight": sparse,
        "body.bias": None,
        "head.weight": None,
        "head.bias": None,
    }
    assert set(chosen(gs.Adaptive(int8)).values()) == {int8}
    assert set(chosen(gs.Adaptive(sparse, tiny=0)).values()) == {sparse}


def test_adaptive_takes_the_first_rule_that_matches():
    adaptive = gs.Adaptive(gs.Int8(), {"head.*": None, 100: gs.BF16(), "embed.*": gs.Int8(32)})
    assert chosen(adaptive) == {
        "embed.weight": gs.Int8(32),
        "embed.bias": gs.BF16(),
        "body.weight": gs.Int8(),
        "body.bias": gs.BF16(),
        "head.weight": None,
        "head.bias": None,
    }
    for rules in ({1.5: gs.Int8()}, {"x": "int8"}):
        with pytest.raises(gs.CodecError, match="a rule must"):
            gs.Adaptive(gs.Int8(), rules)


def test_parameters_of_different_codecs_share_no_bucket_and_train_together():
    adaptive = gs.Adaptive(gs.ErrorFeedback(gs.TopK(0.1)), {"head.*": gs.Int8(32)})

    def body(comm):
        module = seeded(Named)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = gs.DataParallel(
            module, optimizer, algorithm=gs.GradientAllReduce(codec=adaptive), process_group=comm
        )
        first = last = 0.0
        for number, batch in enumerate(batches(30)):
            optimizer.zero_grad()
            loss = square(model(shard(batch, comm)))
            loss.backward()
            optimizer.step()
            first, last = (loss.item(), last) if number == 0 else (first, loss.item())
        names = [set(bucket.names) for bucket in model.engine.buckets]
        model.close()
        assert last < first
        return names

    for names in run_ranks(2, body):
        assert {"body.weight"} in names
        assert {"head.weight", "head.bias"} in names


def test_adaptive_has_one_bit_pattern_on_all_ranks():
    adaptive = gs.Adaptive(gs.TopK(0.5), {"0.*": gs.Int8(32)}, tiny=10)
    weights = run_ranks(
        3, lambda comm: train(comm, build=mlp, algorithm=gs.GradientAllReduce(codec=adaptive))
    )
    assert all(torch.equal(other, weights[0]) for other in weights)
