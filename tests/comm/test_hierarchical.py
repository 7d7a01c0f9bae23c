"""Sums by hosts: exact inside, through a codec between them. Hosts are made up of threads, or found out."""

import pytest
import torch

import gossamer as gs
from gossamer import comm as comms
from tests.support.models import batches, flat_weights, mlp, relative_error, seeded, shard, square
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")
HOSTS = [[[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]]


def sample(rank, numel=1021):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 1021])
def test_the_mean_is_that_of_the_ranks_and_all_hold_equal_bits(hosts, numel):
    def body(comm):
        group = comms.hierarchy(comm, hosts)
        exact, coded = sample(comm.rank, numel), sample(comm.rank, numel)
        gs.all_reduce(exact, op="mean", group=group)
        gs.all_reduce(coded, op="mean", codec=gs.Int8(32), group=group)
        return exact, coded

    results = run_ranks(4, body)
    expected = sum(sample(rank, numel) for rank in range(4)) / 4
    for exact, coded in results:
        torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(coded, results[0][1])
        assert numel == 0 or relative_error(coded, expected) < (1e-6 if len(hosts) == 1 else 2e-2)


@pytest.mark.parametrize("hosts", HOSTS[:3], ids=str)
def test_only_encoded_shards_cross_between_hosts(hosts):
    numel = 64 * 1024

    def body(comm):
        group = comms.hierarchy(comm, hosts)
        gs.all_reduce(sample(comm.rank, numel), codec=gs.Int8(), group=group)
        return group.bytes_across

    across = run_ranks(4, body)
    row = gs.Int8().wire_bytes(numel // min(map(len, hosts)) // 2)
    carriers = {host[place] for host in hosts for place in range(min(map(len, hosts)))}
    assert across == [2 * row if rank in carriers else 0 for rank in range(4)]


def test_a_model_trains_by_hosts_with_error_feedback_and_without():
    def body(comm, other):
        weights = []
        for own, codec in ((comm, gs.ErrorFeedback(gs.Int8(32))), (other, None)):
            module = seeded(mlp)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            group = gs.Hierarchical(own, hosts=[[0], [1, 2]])
            model = gs.DataParallel(
                module, optimizer, algorithm=gs.GradientAllReduce(codec=codec), process_group=group
            )
            for batch in batches(8):
                optimizer.zero_grad()
                square(model(shard(batch, own))).backward()
                optimizer.step()
            weights.append(flat_weights(module))
            model.close()
        return weights

    results = run_ranks(3, body, groups=2)
    for coded, exact in results:
        assert torch.equal(coded, results[0][0])
        assert torch.equal(exact, results[0][1])
        assert relative_error(coded, exact) < 1e-3


def test_ranks_of_one_machine_are_one_host_without_being_told():
    def body(comm):
        return comms.hierarchy(comm).hosts

    assert run_ranks(3, body) == [[[0, 1, 2]]] * 3


@pytest.mark.parametrize("hosts", [[[0], [0, 1]], [[0]], [[0, 1], []], [[0, 1], [2]]], ids=str)
def test_hosts_that_are_not_a_partition_are_refused(hosts):
    def body(comm):
        with pytest.raises(gs.ConfigError, match=r"hosts must name each of the ranks 0 to 1 once"):
            comms.hierarchy(comm, hosts)

    run_ranks(2, body)


def test_different_hosts_on_different_ranks_are_an_error_on_all():
    def body(comm):
        with pytest.raises(gs.ConfigError, match=r"those of \[1\] differ"):
            comms.hierarchy(comm, [[0, 1]] if comm.rank == 0 else [[0], [1]])

    run_ranks(2, body)


def test_a_split_goes_to_its_ranks_only():
    def body(comm):
        part = comms.split(comm, [2, 0])
        if part is None:
            return None
        x = torch.tensor([float(comm.rank)])
        gs.all_reduce(x, group=part)
        return part.rank, part.size, x.item()

    assert run_ranks(3, body) == [(1, 2, 2.0), None, (0, 2, 2.0)]


def test_qadam_goes_on_by_hosts_after_its_warm_up():
    def body(comm):
        module = seeded(mlp)
        optimizer = gs.QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=2)
        group = gs.Hierarchical(comm, hosts=[[0], [1, 2]])
        model = gs.DataParallel(module, optimizer, algorithm="qadam", process_group=group)
        for batch in batches(4):
            optimizer.zero_grad()
            square(model(shard(batch, comm))).backward()
            optimizer.step()
        model.close()
        return flat_weights(module)

    weights = run_ranks(3, body)
    assert all(torch.equal(weights[0], other) for other in weights)
