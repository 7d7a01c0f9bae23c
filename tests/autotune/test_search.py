"""What a search for bucket size and codecs concludes from times that are known."""

import random

import pytest

from gossamer.autotune import search

KIB, MIB = 1 << 10, 1 << 20
SIZES = [25 * MIB, *(2**power for power in range(18, 27))]


def run_search(sizes, codecs, seconds_of):
    """The result, and the steps it took. seconds_of(trial) -> (of a step, of each bucket)."""
    running, steps = search.search(sizes, codecs), 1
    try:
        trial = next(running)
        while True:
            steps += 1 + trial.steps
            samples = [seconds_of(trial) for _ in range(trial.steps)]
            trial = running.send(search.Outcome([each[0] for each in samples], [each[1] for each in samples]))
    except StopIteration as end:
        return end.value, steps


@pytest.mark.parametrize("best", SIZES)
def test_the_fastest_size_wins_also_where_single_steps_vary_by_a_third(best):
    draw = random.Random(best)

    def seconds(trial):
        distance = abs(SIZES.index(trial.bucket_bytes) - SIZES.index(best))
        return (1 + 0.5 * distance) * draw.uniform(1, 1.33), [0.1]

    found, _ = run_search(SIZES, 1, seconds)
    assert found.bucket_bytes == best


def test_without_a_clear_difference_all_stays_as_it_was():
    draw = random.Random(0)
    found, _ = run_search(SIZES, 3, lambda trial: (draw.uniform(1, 1.01), [draw.uniform(1, 1.05)] * 4))
    assert (found.bucket_bytes, found.codecs) == (SIZES[0], 0)


def test_each_bucket_gets_the_codec_that_is_fastest_there():
    costs = [[3.0, 1.0, 2.0], [1.0, 3.0, 3.0], [3.0, 2.0, 1.0]]  # [bucket][codec]

    def seconds(trial):
        codecs = [trial.codecs] * 3 if isinstance(trial.codecs, int) else trial.codecs
        buckets = [cost[codec] for cost, codec in zip(costs, codecs, strict=True)]
        return sum(buckets), buckets

    found, _ = run_search([MIB], 3, seconds)
    assert found.codecs == (1, 0, 2)


def test_a_mixture_whose_steps_take_longer_than_a_single_codecs_is_not_taken():
    def seconds(trial):
        mixed = not isinstance(trial.codecs, int)
        return (5.0 if mixed else [2.0, 1.0][trial.codecs]), [1.0, 2.0] if trial.codecs == 0 else [2.0, 1.0]

    found, _ = run_search([MIB], 2, seconds)
    assert found.codecs == 1


@pytest.mark.parametrize("sizes", range(1, 12))
@pytest.mark.parametrize("codecs", range(1, 8))
def test_a_search_takes_no_more_steps_than_announced(sizes, codecs):
    draw = random.Random(sizes * 100 + codecs)
    _, steps = run_search(
        list(range(1, sizes + 1)), codecs, lambda trial: (draw.random(), [draw.random() for _ in range(5)])
    )
    assert steps <= search.steps_needed(sizes, codecs)


def test_every_search_of_default_sizes_ends_within_200_steps():
    assert search.steps_needed(search.MOST_SIZES, 2) <= search.MAX_STEPS == 200
    for total in [1, 300 * KIB, 5 * MIB, 100 * MIB, 3 << 30]:
        sizes = search.candidate_sizes(25 * MIB, total, lambda size, total=total: -(-total // size))
        assert sizes[0] == 25 * MIB
        assert len(sizes) == len(set(sizes)) <= search.MOST_SIZES
