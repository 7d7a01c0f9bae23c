"""Sums by hosts are the default of every face, with every codec, where ranks share hosts. Hosts are made up."""

import pytest
import torch

import gossamer as gs
from gossamer import comm as comms
from gossamer import hooks
from gossamer.comm import hierarchical
from tests.support.models import batches, flat_weights, mlp, relative_error, seeded, shard, square
from tests.support.ranks import run_ranks
from tests.support.stock_ddp import Training, run_ddp

TWO_BY_TWO, UNEQUAL = [[0, 1], [2, 3]], [[0], [1, 2, 3]]
CODECS = {
    "exact": None,
    "deterministic": gs.Identity(),
    "fp16": gs.FP16(),
    "int8": gs.Int8(32),
    "stochastic": gs.Int8(stochastic=True),
    "minmax": gs.MinMaxUInt8(),
    "int4": gs.ErrorFeedback(gs.Int4()),
    "onebit": gs.ErrorFeedback(gs.OneBit()),
    "topk in python": gs.ErrorFeedback(gs.TopK(0.5)),
}
BOUNDS = {"exact": 1e-6, "deterministic": 1e-6, "fp16": 1e-3, "int8": 2e-2, "stochastic": 3e-2, "minmax": 3e-2,
          "int4": 0.2, "onebit": 1.0, "topk in python": 0.6}  # fmt: skip


@pytest.fixture
def two_hosts(monkeypatch):
    """Ranks 0 and 1 find themselves on one host, 2 and 3 on another."""
    monkeypatch.setattr(hierarchical, "hosts_of", lambda comm: TWO_BY_TWO)


def values(rank, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("hosts", [TWO_BY_TWO, UNEQUAL], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_every_codec_gives_the_mean_and_equal_bits_in_memory_of_the_host_and_elsewhere(hosts, dtype):
    def body(comm):
        group = comms.hierarchy(comm, hosts)
        results = {}
        for name, codec in CODECS.items():
            for numel in (1, 1021, 4096):
                x = values(comm.rank, numel, dtype)
                shared = group.allocate(x.nbytes).view(dtype).copy_(x)
                for place, tensor in (("elsewhere", x), ("in place", shared)):
                    wide = torch.float64 if dtype == torch.float64 else torch.float32
                    error = torch.zeros(numel, dtype=wide) if isinstance(codec, gs.ErrorFeedback) else None
                    gs.all_reduce(tensor, codec=codec, op="mean", error=error, nonce=7, group=group)
                    results[name, numel, place] = tensor.clone()
        return results

    every = run_ranks(4, body)
    rounding = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 0)
    for (name, numel, place), got in every[0].items():
        mean = sum(values(rank, numel, dtype).double() for rank in range(4)) / 4
        assert all(torch.equal(other[name, numel, place], got) for other in every), (name, numel, place)
        assert torch.equal(every[0][name, numel, "in place"], got), (name, numel)
        if numel > 1:
            assert relative_error(got.double(), mean) < BOUNDS[name] + rounding, (name, numel, place)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("islands", [TWO_BY_TWO, UNEQUAL, [[0, 2], [1, 3]]], ids=str)
@pytest.mark.parametrize("numel", [1, 1021, 4096])
def test_islands_of_several_machines_sum_by_operations_of_their_ranks(islands, numel, monkeypatch):
    monkeypatch.setattr(hierarchical, "hosts_of", lambda comm: [[0], [1], [2], [3]])

    def body(comm):
        group = comms.hierarchy(comm, islands)
        exact = gs.all_reduce(values(comm.rank, numel), op="mean", group=group)
        kept = torch.zeros(numel)
        codec = gs.ErrorFeedback(gs.Int4())
        coded = gs.all_reduce(values(comm.rank, numel), codec=codec, op="mean", error=kept, group=group)
        return exact, coded

    results = run_ranks(4, body)
    mean = sum(values(rank, numel) for rank in range(4)) / 4
    for exact, coded in results:
        torch.testing.assert_close(exact, mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(exact, results[0][0])
        assert torch.equal(coded, results[0][1])
        assert relative_error(coded, mean) < 0.2


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("islands", [TWO_BY_TWO, UNEQUAL], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_sums_by_operations_do_not_depend_on_how_a_tensor_is_cut(islands, dtype, monkeypatch):
    monkeypatch.setattr(hierarchical, "hosts_of", lambda comm: [[0], [1], [2], [3]])

    def body(comm):
        group = comms.hierarchy(comm, islands)
        options = {"deterministic": True, "op": "mean", "group": group}
        x = values(comm.rank, 4096, dtype)
        whole = gs.all_reduce(x.clone(), **options)
        parts = [gs.all_reduce(part.clone(), **options) for part in x.split([1, 777, 2500, 818])]
        return whole, torch.cat(parts)

    for whole, parts in run_ranks(4, body):
        assert torch.equal(whole, parts)


def test_large_halves_do_not_overflow_inside_a_host():
    def body(comm):
        x = torch.full((100,), 40_000.0, dtype=torch.float16)
        return gs.all_reduce(x, codec=gs.Identity(), op="mean", group=comms.hierarchy(comm, UNEQUAL))

    for mean in run_ranks(4, body):
        assert torch.equal(mean, torch.full_like(mean, 40_000.0))


@pytest.mark.usefixtures("backend", "two_hosts")
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "deterministic", "int4"])
def test_a_model_goes_by_hosts_without_being_told_and_its_bits_do_not_depend_on_buckets(algorithm):
    made = {
        "deterministic": lambda: gs.GradientAllReduce(deterministic=True),
        "int4": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4())),
    }.get(algorithm, lambda: algorithm)

    def body(*given):
        weights, ways = [], []
        sizes = (1 << 10, 1 << 20, 1 << 20)
        for comm, group, size in zip(given, (*given[:2], gs.Flat(given[2])), sizes, strict=True):
            module = seeded(mlp)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            model = gs.DataParallel(
                module, optimizer, algorithm=made(), process_group=group, bucket_bytes=size
            )
            for batch in batches(5):
                optimizer.zero_grad()
                square(model(shard(batch, comm))).backward()
                optimizer.step()
            weights.append(flat_weights(module))
            ways.append(model.report()["sums"])
            model.close()
        return weights, ways

    results = run_ranks(4, body, groups=3)
    for (small, large, flat), ways in results:
        assert ways == ["by hosts: 2 hosts x 2 ranks", "by hosts: 2 hosts x 2 ranks", "flat, as asked"]
        assert torch.equal(small, large)
        assert torch.equal(small, results[0][0][0])
        assert relative_error(small, flat) < 1e-2


@pytest.mark.usefixtures("two_hosts")
def test_local_sgd_and_qadam_go_by_hosts():
    def body(comm, other):
        module = seeded(mlp)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        local = gs.LocalSGD(2, codec=gs.ErrorFeedback(gs.Int4()))
        weights = []
        for own, given, algorithm in (
            (comm, optimizer, local),
            (other, gs.QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=2), "qadam"),
        ):
            model = gs.DataParallel(module, given, algorithm=algorithm, process_group=own)
            for batch in batches(4):
                given.zero_grad()
                square(model(shard(batch, own))).backward()
                given.step()
            assert model.report()["sums"].startswith("by hosts")
            assert model.engine._comm.bytes_across > 0
            weights.append(flat_weights(module))
            model.close()
        return weights

    results = run_ranks(4, body, groups=2)
    for weights in results:
        assert all(torch.equal(own, first) for own, first in zip(weights, results[0], strict=True))


@pytest.mark.usefixtures("two_hosts")
def test_gossip_stays_between_all_ranks():
    def body(comm):
        module = seeded(mlp)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = gs.DataParallel(module, optimizer, algorithm="decentralized", process_group=comm)
        for batch in batches(3):
            optimizer.zero_grad()
            square(model(shard(batch, comm))).backward()
            optimizer.step()
        across = model.engine._comm.bytes_across
        model.close()
        return across

    assert run_ranks(4, body) == [0] * 4


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("name", ["bytegrad", "int8", "int4", "onebit", "deterministic", "powersgd"])
def test_hooks_of_stock_ddp_go_by_hosts_and_buckets_change_no_bit(name):
    def body(group, comm):
        weights, ways = [], []
        for variant in ({}, {"native": True}, {"bucket_cap_mb": 25}):
            training = Training(group, comm, getattr(hooks, name), **variant)
            weights.append(training.run())
            ways.append(training.state.sums)
            training.state.close()
        return weights, ways

    results = run_ddp(4, body)
    for weights, ways in results:
        assert all(torch.equal(each, results[0][0][0]) for each in weights)
        assert ways == ["by hosts: 2 hosts x 2 ranks"] * 3


def test_errors_call_the_ranks_of_a_level_by_their_numbers_in_the_group():
    def body(comm):
        module = seeded(mlp)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = gs.DataParallel(
            module, optimizer, algorithm="bytegrad", process_group=gs.Hierarchical(comm, TWO_BY_TWO)
        )
        square(model(batches(1)[0])).backward()
        if comm.rank == 3:
            model.engine.close(crashed=True)
            return ""
        with pytest.raises(gs.CommError) as caught:  # noqa: PT012  (in the first step, or the next)
            while True:
                square(model(batches(1)[0])).backward()
        model.engine.close(crashed=True)
        return str(caught.value)

    for text in run_ranks(4, body)[:3]:
        assert "rank 3 has failed" in text
        assert "on rank 0/2" not in text


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [([[0, 1, 2, 3]], False), ([[0], [1], [2]], False), ([[0, 1], [2, 3]], True), ([[0], [1, 2]], True)],
)
def test_sums_go_by_hosts_where_several_hosts_have_several_ranks(hosts, expected):
    assert comms.goes_by_hosts(hosts) is expected
