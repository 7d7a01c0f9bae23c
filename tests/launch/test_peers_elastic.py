# gs.elastic where the ranks train alone, and each averages with some of the others: gs.LocalSGD with a topology.

import signal

import pytest

import gossamer as gs
from gossamer.topology import resolve
from tests.launch.test_plain_elastic import (
    ALL_COME_AGAIN,
    EXACT,
    begin,
    benchmark,
    ends,
    lines_of,
    loop,
    parts,
    wait_until,
)
from tests.launch.test_uneven_elastic import SLOW, times_drawn

peers = benchmark("elastic_peers")
PAIRS = {"period": 4, "outer": True, "topology": "random_pairs"}
RING = {"period": 4, "topology": "ring"}


def checked(folder, local) -> dict[str, float]:
    """What the replay of a run says."""
    return peers.check(folder, topology=resolve(local["topology"]), outer=local.get("outer", False))


@pytest.mark.parametrize(
    ("local", "more"), [(PAIRS, {}), (RING, {"backend": "gloo"})], ids=["noloco", "ring gloo"]
)
def test_the_others_average_exactly_and_train_on(fork, tmp_path, local, more) -> None:
    kill = {"1": [6, "backward"], "0": [12, "after"], "3": [17, "forward"]}
    flags = ["--min-np", "1", "-np", "4"]
    code, _, err = begin(fork, tmp_path, flags, epochs=2, kill=kill, local=local, **more).finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 3
    result = checked(tmp_path, local)
    assert result["means"] in (2, 3), "the last two may die before the others meet"
    assert result["worst"] < EXACT
    assert ends(tmp_path)[2]["rounds"] == result["averagings"]


def test_a_newcomer_begins_where_the_others_are(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN]
    kill = {"1": [6, "backward"], "0": [14, "after"]}
    run = begin(fork, tmp_path, flags, epochs=10**6, kill=kill, sleep_s=0.02, local=PAIRS)
    for number in (3, 4):
        wait_until(lambda number=number: lines_of(tmp_path, number, "average") >= 2)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    result = checked(tmp_path, PAIRS)
    assert result["worst"] < EXACT
    assert {number: end["rounds"] for number, end in ends(tmp_path).items()} == dict.fromkeys(
        (2, 3, 4), result["averagings"]
    )
    assert len({end["final"] for end in ends(tmp_path).values()}) == 1, "on_stop may call consensus()"
    lines = [line for own in loop.journals(tmp_path).values() for line in own]
    copied = {number: line["copied"] for line in lines if "new" in line for number in line["new"]}
    assert copied[4], "the inner optimizer, while the others trained"


def test_a_worker_that_is_told_to_end_leaves_after_an_averaging(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "-np", "3"]
    run = begin(fork, tmp_path, flags, epochs=2, term={"0": 9}, local=PAIRS, sleep_s=0.02)
    code, _, err = run.finish()
    assert code == 0, err
    assert "worker 0 (slot 0 of localhost) has gone, as it was told; 2 are left" in err
    assert checked(tmp_path, PAIRS)["worst"] < EXACT
    assert sorted(ends(tmp_path)) == [1, 2]


def test_a_rank_waits_for_its_peers_and_for_the_others_an_averaging_later(fork, tmp_path) -> None:
    nap_s = 3.0
    flags = ["--min-np", "1", "-np", "4"]
    run = begin(fork, tmp_path, flags, epochs=2, nap={"1": [9, nap_s]}, local=PAIRS)
    code, _, err = run.finish()
    assert code == 0, err
    assert checked(tmp_path, PAIRS)["worst"] < EXACT
    taken = {
        number: {line["average"]: line["time"] for line in own if "average" in line}
        for number, own in loop.journals(tmp_path).items()
    }
    ranks = {
        number: next(line["rank"] for line in own if "draw" in line)
        for number, own in loop.journals(tmp_path).items()
    }
    [exchange] = resolve("random_pairs").mixing(2, 4, ranks[1]).exchanges  # the averaging after steps 9 to 12
    waits = next(number for number, rank in ranks.items() if rank == exchange.to)
    others = set(ranks) - {1, waits}
    before = max(own[2] for own in taken.values())
    assert taken[waits][3] > before + nap_s / 2
    assert all(taken[number][3] < before + nap_s / 2 for number in others)
    assert all(taken[number][4] > before + nap_s / 2 for number in others)


def test_by_clocks_every_sample_of_the_dead_is_drawn_by_others(fork, tmp_path) -> None:
    local = {"period_s": 0.3, "outer": True, "topology": "random_pairs"}
    kill = {"0": [12, "after"]}
    run = begin(fork, tmp_path, ["--min-np", "1", "-np", "4"], epochs=2, kill=kill, local=local, **SLOW)
    code, _, err = run.finish()
    assert code == 0, err
    assert min(times_drawn(tmp_path).values()) == 2
    assert len(times_drawn(tmp_path)) == loop.SAMPLES
    last = {number: end["rounds"] for number, end in ends(tmp_path).items()}
    assert len(last) == 3
    assert len(set(last.values())) == 1


@pytest.mark.usefixtures("group_of_one")
def test_a_deadline_is_refused() -> None:
    loader, net, optimizer = parts()
    model = gs.DataParallel(net, optimizer, algorithm=gs.LocalSGD(topology="ring"))
    with pytest.raises(gs.ConfigError, match=r"a deadline needs gs.LocalSGD without a topology, .*Ring\(\)"):
        gs.elastic(loader, model, optimizer, deadline_s=1)
    model.close()
