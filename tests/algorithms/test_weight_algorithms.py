"""What decentralized averaging promises beyond the contract that all algorithms keep to."""

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer.topology import consensus_steps, resolve
from tests.support.models import batches, flat_weights, mlp, relative_error, seeded, shard
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("topology", ["all", "base_graph", "one_peer_exponential", "shift_one", "ring"])
def test_without_learning_ranks_reach_consensus_in_the_rounds_that_the_topology_says(topology, size):
    rounds = consensus_steps(resolve(topology), size, limit=15)

    def body(comm):
        model, optimizer = wrap(comm, gs.Decentralized(topology), lr=0.0, seed=comm.rank, broadcast=False)
        start = flat_weights(model.module)
        spread = []
        for batch in batches(8):
            step(model, optimizer, batch)
            spread.append(flat_weights(model.module))
        model.close()
        return start, spread

    results = run_ranks(size, body)
    mean = sum(start for start, _ in results) / size
    for number in range(8):
        apart = max(relative_error(spread[number], mean) for _, spread in results)
        agreed = rounds is not None and number + 1 >= rounds
        assert (apart < 1e-6) == agreed, f"{apart} after {number + 1} rounds"


def test_decentralized_sends_its_weights_once_a_step_and_nothing_else_but_agreements():
    def body(comm):
        model, optimizer = wrap(comm, gs.Decentralized("shift_one"), build=lambda: nn.Linear(512, 256))
        before = model.engine.bytes_sent
        for batch in batches(4, width=512):
            step(model, optimizer, batch)
        sent, numel = model.engine.bytes_sent - before, sum(bucket.numel for bucket in model.engine.buckets)
        model.close()
        return sent / (4 * numel * 4)

    assert all(1.0 <= share < 1.01 for share in run_ranks(2, body))


@pytest.mark.parametrize(
    "codec", [gs.Int8(32), gs.MinMaxUInt8(), gs.Int4(), gs.OneBit(), gs.TopK(0.2)], ids=str
)
def test_copies_of_a_neighbours_weights_stay_equal_to_them_bit_for_bit(codec):
    def body(comm):
        model, optimizer = wrap(
            comm, gs.LowPrecisionDecentralized(codec, gamma=0.4), seed=comm.rank, broadcast=False
        )
        for batch in batches(12):
            step(model, optimizer, shard(batch, comm))
        (bucket,) = model.engine.buckets
        fields = {name: bucket.flat(name).clone() for name in bucket.fields}
        model.close()
        return fields

    results = run_ranks(3, body)
    for rank, fields in enumerate(results):
        assert torch.equal(fields["weight"], fields["replica"])
        copies = [fields["replica_0"], fields["replica_1"]]
        for neighbour in (rank - 1, (rank + 1) % 3):
            assert any(torch.equal(copy, results[neighbour]["weight"]) for copy in copies)


def test_a_topology_that_changes_is_refused_where_copies_of_peers_are_kept():
    def body(comm):
        for topology in ("all", "one_peer_exponential", "base_graph"):
            with pytest.raises(gs.ConfigError, match="must be a graph that stays as it is"):
                wrap(comm, gs.LowPrecisionDecentralized(topology=topology))

    run_ranks(3, body)


def test_weights_may_be_loaded_and_replaced_between_steps():
    def body(comm):
        model, optimizer = wrap(comm, gs.Decentralized("all"), lr=0.0)
        other = seeded(mlp, seed=5)
        step(model, optimizer, batches(1)[0])
        model.load_state_dict(other.state_dict())
        step(model, optimizer, batches(1)[0])
        loaded = flat_weights(model.module)
        for param in model.module.parameters():
            param.data = param.data.clone() * 2  # as moving averages of weights are swapped in
        step(model, optimizer, batches(1)[0])
        replaced = flat_weights(model.module)
        model.close()
        return loaded, replaced

    expected = flat_weights(seeded(mlp, seed=5))
    for loaded, replaced in run_ranks(2, body):
        torch.testing.assert_close(loaded, expected)
        torch.testing.assert_close(replaced, 2 * expected)
