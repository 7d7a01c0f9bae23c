# Who averages with whom: every round is a fair exchange, and the mean is reached when it is claimed to be.
#
# Exact arithmetic throughout: the weights, given as floats, are fractions with denominators up to the size.

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.topology import (
    TOPOLOGIES,
    All,
    BaseGraph,
    Exchange,
    Mixing,
    OnePeerExponential,
    RandomPairs,
    Ring,
    ShiftOne,
    Topology,
    consensus_steps,
    mixing_matrix,
    resolve,
)

SPARSE = [Ring(), ShiftOne(), OnePeerExponential(), RandomPairs(), *(BaseGraph(k) for k in (1, 2, 3, 4))]
SIZES = st.integers(1, 48)
STEPS = st.integers(0, 100)


def round_of(topology: Topology, step: int, size: int) -> list[Mixing]:
    return [topology.mixing(step, size, rank) for rank in range(size)]


def shares(topology: Topology, step: int, size: int) -> list[list[tuple[int, Fraction]]]:
    """For every rank, (source, weight) of each model that it averages, its own first."""
    rows = []
    for rank, mixing in enumerate(round_of(topology, step, size)):
        weights = [(rank, mixing.own), *((each.source, each.weight) for each in mixing.exchanges)]
        rows.append(
            [(source, Fraction(weight).limit_denominator(max(size, 3))) for source, weight in weights]
        )
    return rows


def exact_steps(topology: Topology, size: int, limit: int, start: int = 0) -> int | None:
    """consensus_steps without rounding: product[r][c] / scale is an entry of the product of the matrices."""
    product, scale = [[int(row == column) for column in range(size)] for row in range(size)], 1
    for done in range(limit + 1):
        if all(entry * size == scale for row in product for entry in row):
            return done
        rows = shares(topology, start + done, size)
        common = math.lcm(*(weight.denominator for row in rows for _, weight in row))
        whole = [[(source, int(weight * common)) for source, weight in row] for row in rows]
        product = [
            [sum(weight * product[source][column] for source, weight in row) for column in range(size)]
            for row in whole
        ]
        scale *= common
    return None


@given(st.sampled_from(SPARSE), SIZES, STEPS)
def test_every_round_is_doubly_stochastic(topology, size, step) -> None:
    given_away = [Fraction(0)] * size
    for row in shares(topology, step, size):
        assert sum(weight for _, weight in row) == 1
        for source, weight in row:
            assert weight >= 0
            given_away[source] += weight
    assert given_away == [1] * size
    matrix = mixing_matrix(topology, step, size)
    for line in [*matrix, *zip(*matrix, strict=True)]:
        assert sum(line) == pytest.approx(1, abs=1e-14)


@given(st.sampled_from(SPARSE), SIZES, STEPS)
def test_every_message_is_expected_and_no_two_go_to_one_peer(topology, size, step) -> None:
    mixings = round_of(topology, step, size)
    sent = [(rank, each.to) for rank, mixing in enumerate(mixings) for each in mixing.exchanges]
    expected = [(each.source, rank) for rank, mixing in enumerate(mixings) for each in mixing.exchanges]
    assert sorted(sent) == sorted(expected)
    assert len(set(sent)) == len(sent)
    assert all(0 <= a < size and 0 <= b < size and a != b for a, b in sent)


@given(st.sampled_from(SPARSE), SIZES, STEPS)
def test_exchanges_one_after_the_other_never_wait_in_a_circle(topology, size, step) -> None:
    # Strictest network: an exchange ends only when `to` is receiving from, and `source` sending to, this rank.
    waiting = [list(mixing.exchanges) for mixing in round_of(topology, step, size)]
    while any(waiting):
        now = {rank: queue[0] for rank, queue in enumerate(waiting) if queue}
        while True:  # exchanges whose both peers are at the same exchange, and so on around
            ready = {
                rank: each
                for rank, each in now.items()
                if (peer := now.get(each.to)) and peer.source == rank
                if (peer := now.get(each.source)) and peer.to == rank
            }
            if len(ready) == len(now):
                break
            now = ready
        assert now, f"{topology} size {size} step {step}: {waiting}"
        for rank in now:
            waiting[rank].pop(0)


@given(st.sampled_from(SPARSE), SIZES, STEPS)
def test_schedule_repeats_after_its_period(topology, size, step) -> None:
    assert round_of(topology, step, size) == round_of(topology, step + topology.period(size), size)


@pytest.mark.parametrize("topology", SPARSE, ids=repr)
def test_period_is_the_shortest(topology) -> None:
    for size in range(1, 25):
        rounds = [round_of(topology, step, size) for step in range(topology.period(size))]
        for shift in range(1, len(rounds)):
            assert rounds != rounds[shift:] + rounds[:shift], f"size {size} repeats after {shift}"


@pytest.mark.parametrize("size", range(1, 34))
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_graph_reaches_the_exact_mean_in_one_period_with_at_most_k_peers(k, size) -> None:
    graph = BaseGraph(k)
    period = graph.period(size)
    assert exact_steps(graph, size, limit=period) == (0 if size == 1 else period)
    for step in range(period):
        assert all(len(mixing.exchanges) <= k for mixing in round_of(graph, step, size))


@given(st.integers(1, 4), st.integers(2, 24), STEPS)
def test_base_graph_reaches_the_exact_mean_from_any_step_in_less_than_two_periods(k, size, start) -> None:
    graph = BaseGraph(k)
    assert exact_steps(graph, size, limit=2 * graph.period(size) - 1, start=start) is not None


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_graph_takes_fewer_rounds_than_its_papers_bound(k) -> None:
    for size in range(2, 66):
        rounds = BaseGraph(k).period(size)
        assert math.log(size, k + 1) - 1e-9 <= rounds < 2 * math.log(size, k + 1) + 2


def test_base_graph_takes_the_least_possible_rounds_where_size_is_a_power() -> None:
    for k, power in itertools.product((1, 2, 3), (1, 2, 3)):
        assert BaseGraph(k).period((k + 1) ** power) == power
    assert [BaseGraph(size - 1).period(size) for size in range(2, 12)] == [1] * 10
    assert BaseGraph(7).period(216) == 3  # 6 * 6 * 6; the greatest factors first would be 8 * 3 * 3 * 3


def test_base_graph_of_three_is_as_worked_out_by_hand() -> None:
    # Let m be the mean of ranks 0 and 1, and x the value of rank 2. The star gives rank 0 (m + 2x)/3, and rank 2 the
    # mean (2m + x)/3. The mean of (m + 2x)/3 and m is (2m + x)/3 too.
    pair = [Mixing(0.5, (Exchange(1, 1, 0.5),)), Mixing(0.5, (Exchange(0, 0, 0.5),)), Mixing(1.0, ())]
    star = [Mixing(1 / 3, (Exchange(2, 2, 2 / 3),)), Mixing(1.0, ()), Mixing(1 / 3, (Exchange(0, 0, 2 / 3),))]
    assert [round_of(BaseGraph(), step, 3) for step in range(3)] == [pair, star, pair]


@pytest.mark.parametrize("size", range(2, 34, 2))
def test_shift_one_is_baguas_pairing_for_even_sizes(size) -> None:
    half = size // 2
    assert ShiftOne().period(size) == half
    for step in range(2 * half + 1):
        for rank, mixing in enumerate(round_of(ShiftOne(), step, size)):
            peer = half + (step + rank) % half if rank < half else (rank - half - step) % half
            assert mixing == Mixing(0.5, (Exchange(peer, peer, 0.5),))


def test_shift_one_of_six_pairs_as_in_baguas_documented_formula() -> None:
    peers = [[mixing.exchanges[0].to for mixing in round_of(ShiftOne(), step, 6)] for step in range(3)]
    assert peers == [[3, 4, 5, 0, 1, 2], [4, 5, 3, 2, 0, 1], [5, 3, 4, 1, 2, 0]]


@pytest.mark.parametrize("size", range(3, 34, 2))
def test_shift_one_is_a_tournament_for_odd_sizes(size) -> None:
    met, idle = [], []
    assert ShiftOne().period(size) == size
    for step in range(size):
        for rank, mixing in enumerate(round_of(ShiftOne(), step, size)):
            if not mixing.exchanges:
                idle.append(rank)
                continue
            (exchange,) = mixing.exchanges
            assert exchange.to == exchange.source
            met.append((rank, exchange.to))
        assert len(idle) == step + 1
    assert sorted(idle) == list(range(size))
    assert sorted(met) == sorted(itertools.permutations(range(size), 2))


def test_ring_weighs_neighbours_and_self_alike() -> None:
    third = 1 / 3
    assert Ring().mixing(7, 5, 0) == Mixing(third, (Exchange(1, 4, third), Exchange(4, 1, third)))
    assert Ring().mixing(0, 2, 1) == Mixing(0.5, (Exchange(0, 0, 0.5),))
    assert Ring().mixing(0, 1, 0) == Mixing(1.0, ())


@pytest.mark.parametrize("exponent", range(6))
def test_one_peer_exponential_is_exact_after_log2_rounds_from_any_step(exponent) -> None:
    for start in range(exponent + 1):
        assert exact_steps(OnePeerExponential(), 1 << exponent, limit=exponent, start=start) == exponent


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 12])
def test_one_peer_exponential_only_approaches_the_mean_of_other_sizes(size) -> None:
    assert exact_steps(OnePeerExponential(), size, limit=100) is None
    assert consensus_steps(OnePeerExponential(), size) is not None


@pytest.mark.parametrize("size", [4, 7, 8])
def test_random_pairs_meet_everyone_about_equally_often_and_a_seed_changes_them(size) -> None:
    met = dict.fromkeys(itertools.permutations(range(size), 2), 0)
    idle = [0] * size
    for step in range(RandomPairs().period(size)):
        for rank, mixing in enumerate(round_of(RandomPairs(), step, size)):
            idle[rank] += not mixing.exchanges
            for exchange in mixing.exchanges:
                met[rank, exchange.to] += 1
    mean = sum(met.values()) / len(met)
    assert all(0.7 * mean < times < 1.3 * mean for times in met.values())
    assert (max(idle) == 0) == (size % 2 == 0)
    assert [round_of(RandomPairs(1), step, size) for step in range(9)] != [
        round_of(RandomPairs(2), step, size) for step in range(9)
    ]
    with pytest.raises(ConfigError, match="seed must be an int, got 1.5"):
        RandomPairs(1.5)


def test_all_is_one_exact_round_without_exchanges() -> None:
    assert [name for name, kind in TOPOLOGIES.items() if kind.uniform] == ["all"]
    assert mixing_matrix(All(), 3, 4) == [[0.25] * 4] * 4
    assert [consensus_steps(All(), size) for size in (1, 2, 7)] == [0, 1, 1]
    with pytest.raises(ConfigError, match="all-reduce"):
        All().mixing(0, 4, 0)


@given(st.sampled_from([*SPARSE, All()]), st.integers(1, 16))
def test_consensus_steps_agrees_with_exact_arithmetic(topology, size) -> None:
    exact = (size > 1) * 1 if topology.uniform else exact_steps(topology, size, limit=15)
    assert consensus_steps(topology, size, limit=15) == exact


def test_consensus_steps_counts_rounds_to_a_tolerance_and_gives_up_at_the_limit() -> None:
    assert consensus_steps(Ring(), 4, tolerance=0.75) == 0
    assert consensus_steps(Ring(), 4, tolerance=0.1) == 2  # eigenvalues 1, 1/3, 1/3, -1/3
    assert consensus_steps(Ring(), 12, limit=10) is None


def test_names_resolve_to_topologies_with_default_settings() -> None:
    shown = "All() Ring() ShiftOne() OnePeerExponential() BaseGraph(k=1) RandomPairs(seed=0)"
    assert [repr(resolve(name)) for name in TOPOLOGIES] == shown.split()
    graph = BaseGraph(k=3)
    assert resolve(graph) is graph
    assert repr(graph) == "BaseGraph(k=3)"
    assert graph == BaseGraph(3) != BaseGraph(2)
    assert len({BaseGraph(3), graph, Ring(), Ring()}) == 2


@pytest.mark.parametrize("unknown", ["torus", "", None, Ring, 3])
def test_unknown_topology_is_refused_with_the_known_names(unknown) -> None:
    with pytest.raises(
        ConfigError, match="all, ring, shift_one, one_peer_exponential, base_graph, random_pairs"
    ):
        resolve(unknown)


@pytest.mark.parametrize("topology", SPARSE, ids=repr)
def test_ranks_and_rounds_that_do_not_exist_are_refused_with_their_values(topology) -> None:
    for size in (0, -1, 2.0, "2", True, None):
        with pytest.raises(ConfigError, match=f"size must be an int >= 1, got {size!r}"):
            topology.period(size)
        with pytest.raises(ConfigError, match="size must be"):
            consensus_steps(topology, size)
    for rank in (-1, 4, 1.0, None):
        with pytest.raises(ConfigError, match=f"to size - 1 = 3, got {rank!r}"):
            topology.mixing(0, 4, rank)
    for step in (-1, 0.5):
        with pytest.raises(ConfigError, match=f"step must be an int >= 0, got {step!r}"):
            mixing_matrix(topology, step, 4)


def test_settings_that_cannot_work_are_refused_with_their_values() -> None:
    for k in (0, -2, 1.0, "1", True):
        with pytest.raises(ConfigError, match=f"BaseGraph: k.* got {k!r}"):
            BaseGraph(k)
    for tolerance, limit in ((-1.0, 5), (math.nan, 5), (0.1, -1), (0.1, 2.5)):
        with pytest.raises(ConfigError, match="consensus_steps"):
            consensus_steps(Ring(), 4, tolerance, limit)
