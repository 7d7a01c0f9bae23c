# gs.elastic with gs.AsyncModelAverage: weights are averaged in the background, and nobody waits for a round.

import signal
from collections import Counter

import pytest

import gossamer as gs
from tests.launch.test_plain_elastic import (
    ALL_COME_AGAIN,
    EXACT,
    averages,
    begin,
    ends,
    lines_of,
    loop,
    parts,
    wait_until,
)
from tests.launch.test_uneven_elastic import SLOW, drawn, times_drawn

OFTEN = {"sync_interval_ms": 30}


@pytest.mark.parametrize("more", [SLOW, {"sleep_s": 0.01}], ids=["one slow", "equal"])
def test_workers_average_in_the_background_and_draw_every_sample_once_in_an_epoch(
    fork, tmp_path, more
) -> None:
    code, _, err = begin(
        fork, tmp_path, ["--min-np", "1", "-np", "3"], epochs=2, rounds=OFTEN, **more
    ).finish()
    assert code == 0, err
    assert set(times_drawn(tmp_path).values()) == {2}
    assert len(times_drawn(tmp_path)) == loop.SAMPLES
    result = averages.check_rounds(loop.journals(tmp_path))
    assert result["worst"] < EXACT
    assert result["rounds"] > 5
    last = ends(tmp_path)
    assert {end["rounds"] for end in last.values()} == {result["rounds"]}
    assert len({end["final"] for end in last.values()}) == 1
    steps = [lines_of(tmp_path, number, "step") for number in range(3)]
    assert more is not SLOW or steps[1] < min(steps[0], steps[2]) / 1.5, steps


@pytest.mark.parametrize("over", ["gossamer", "gloo"])
def test_the_others_train_on_without_the_dead(fork, tmp_path, over) -> None:
    kill = {"0": [15, "after"], "1": [12, "forward"], "3": [20, "backward"]}
    flags = ["--min-np", "1", "-np", "4"]
    plan = {"kill": kill, "rounds": OFTEN, "sleep_s": 0.02, "backend": over}
    code, _, err = begin(fork, tmp_path, flags, epochs=2, **plan).finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 3
    assert min(times_drawn(tmp_path).values()) == 2
    assert len(times_drawn(tmp_path)) == loop.SAMPLES
    result = averages.check_rounds(loop.journals(tmp_path))
    assert result["worst"] < EXACT
    assert ends(tmp_path)[2]["rounds"] == result["rounds"]


def test_a_newcomer_takes_the_mean_of_the_weights_and_takes_part_in_rounds(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN]
    plan = {"kill": {"2": [10, "after"], "0": [40, "backward"]}, "rounds": OFTEN, "sleep_s": 0.02}
    run = begin(fork, tmp_path, flags, epochs=10**6, **plan)
    for number in (3, 4):
        wait_until(lambda number=number: lines_of(tmp_path, number, "added") >= 3)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    lines = loop.journals(tmp_path)
    assert averages.check_rounds(lines)["worst"] < EXACT
    saved = {number: end["rounds"] for number, end in ends(tmp_path).items()}
    assert sorted(saved) == [1, 3, 4]
    assert len(set(saved.values())) == 1
    assert lines[3][0]["begin"] == lines[3][0]["total"] > 3, "the counter that the script gave comes along"
    first, newcomer = (sum([line["loss"] for line in lines[n] if "step" in line][:8]) for n in (1, 3))
    assert newcomer < first, "it begins where the others are"


def test_a_worker_that_is_told_to_end_leaves_after_a_round(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "-np", "3"]
    plan = {"term": {"0": 10}, "rounds": OFTEN, "sleep_s": 0.02}
    code, _, err = begin(fork, tmp_path, flags, epochs=3, **plan).finish()
    assert code == 0, err
    assert "worker 0 (slot 0 of localhost) has gone, as it was told; 2 are left" in err
    assert set(times_drawn(tmp_path).values()) == {3}, "it left its data to the others"
    assert sorted(ends(tmp_path)) == [1, 2]
    last = Counter(line["epoch"] for line in drawn(tmp_path))
    assert max(last) == 2


@pytest.mark.usefixtures("group_of_one")
def test_abort_is_refused_because_the_group_learns_of_changes_in_rounds() -> None:
    loader, net, optimizer = parts()
    algorithm = gs.AsyncModelAverage()
    model = gs.DataParallel(net, optimizer, algorithm=algorithm)
    gs.elastic(loader, model, optimizer)
    with pytest.raises(gs.ConfigError, match="under gs.elastic every rank takes part in all rounds"):
        algorithm.abort()
    model.close()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("settings", "more", "reason"),
    [
        ({"warmup_steps": 2}, {}, "must have no warmup_steps"),
        ({}, {"deadline_s": 1.0}, "a deadline needs gs.LocalSGD"),
    ],
)
def test_what_async_cannot_do_here_is_refused_with_the_reason(settings, more, reason) -> None:
    loader, net, optimizer = parts()
    model = gs.DataParallel(net, optimizer, algorithm=gs.AsyncModelAverage(**settings))
    with pytest.raises(gs.ConfigError, match=reason):
        gs.elastic(loader, model, optimizer, **more)
    model.close()
