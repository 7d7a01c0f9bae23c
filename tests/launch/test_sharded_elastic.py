# gs.elastic where each rank keeps a share of the optimizer's state: gs.Sharded.

import signal

import pytest

import gossamer as gs
from tests.launch.test_plain_elastic import (
    ALL_COME_AGAIN,
    EXACT,
    begin,
    ends,
    lines_of,
    loop,
    parts,
    wait_until,
)

TWO = {"sharded": {"holders": 2}}
CLIP = 0.5


def checked(folder, plan) -> dict[str, float]:
    """What the replay of a run says, which trains by Adam without shards."""
    return loop.check(folder, exact=not plan.get("codec"), clip=plan.get("clip"))


@pytest.mark.parametrize(
    "more",
    [{}, {"clip": CLIP, "backend": "gloo"}, {"codec": "int8", "clip": CLIP}],
    ids=["exact", "clipped gloo", "codec"],
)
def test_the_others_have_all_of_the_state_and_end_the_step(fork, tmp_path, more) -> None:
    kill = {"1": [6, "backward"], "0": [12, "after"], "3": [17, "clipped"]}
    code, _, err = begin(fork, tmp_path, ["--min-np", "1", "-np", "4"], kill=kill, **TWO, **more).finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 3
    result = checked(tmp_path, more)
    assert result["worst"] < EXACT
    assert result["steps"] > 18
    assert list(ends(tmp_path)) == [2]


@pytest.mark.parametrize("more", [{"clip": CLIP}, {"codec": "int8"}], ids=["exact", "codec"])
def test_a_newcomer_gets_its_share(fork, tmp_path, more) -> None:
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN]
    kill = {"1": [6, "backward"], "0": [14, "forward"]}
    run = begin(fork, tmp_path, flags, epochs=10**6, kill=kill, sleep_s=0.02, **TWO, **more)
    for number in (3, 4):
        wait_until(lambda number=number: lines_of(tmp_path, number, "step") > 2)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    result = checked(tmp_path, more)
    assert result["worst"] < EXACT
    assert {end["saved"] for end in ends(tmp_path).values()} == {result["steps"]}
    assert sorted(ends(tmp_path)) == [2, 3, 4]


def test_a_worker_that_is_told_to_end_leaves_its_share(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "-np", "3"]
    code, _, err = begin(fork, tmp_path, flags, term={"0": 4}, sleep_s=0.02, **TWO).finish()
    assert code == 0, err
    assert "worker 0 (slot 0 of localhost) has gone, as it was told; 2 are left" in err
    assert checked(tmp_path, {})["worst"] < EXACT
    assert sorted(ends(tmp_path)) == [1, 2]


def test_a_state_that_died_with_all_its_holders_is_missed_on_all_ranks(fork, tmp_path) -> None:
    kill = {"1": [6, "forward"], "2": [6, "forward"]}
    code, _, err = begin(fork, tmp_path, ["--min-np", "1", "-np", "4"], kill=kill, **TWO).finish()
    assert code != 0
    assert err.count("elements was only on ranks that are gone; begin again from a checkpoint") >= 2


def test_three_holders_survive_two_deaths_at_once(fork, tmp_path) -> None:
    kill = {"1": [6, "forward"], "2": [6, "forward"]}
    plan = {"sharded": {"holders": 3}, "clip": CLIP}
    code, _, err = begin(fork, tmp_path, ["--min-np", "1", "-np", "4"], kill=kill, **plan).finish()
    assert code == 0, err
    assert checked(tmp_path, plan)["worst"] < EXACT
    assert sorted(ends(tmp_path)) == [0, 3]


@pytest.mark.usefixtures("group_of_one")
def test_one_holder_is_refused() -> None:
    loader, net, _ = parts()
    optimizer = gs.ShardedOptimizer(gs.optim.AdamW, net.parameters())
    model = gs.DataParallel(net, optimizer, algorithm=gs.Sharded())
    with pytest.raises(gs.ConfigError, match=r"elastic: Sharded\(.*must have holders=2 or more"):
        gs.elastic(loader, model, optimizer)
    model.close()
