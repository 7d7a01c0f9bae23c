# gs.elastic with the model on the simulated device: tests/late/elastic.py is what the workers run. Its device fails as
# a GPU does whose operations go over NCCL, or through memory of the host.

import signal
from functools import partial

import pytest

from gossamer.topology import resolve
from tests import ROOT
from tests.launch.test_consensus_elastic import ADAMS, checked
from tests.launch.test_peers_elastic import PAIRS, peers
from tests.launch.test_plain_elastic import (
    ALL_COME_AGAIN,
    DILOCO,
    EXACT,
    STREAMING,
    averages,
    begin,
    ends,
    lines_of,
    loop,
    wait_until,
)

on_device = partial(begin, script=ROOT / "tests" / "late" / "elastic.py", device="late")


def replayed(folder, plan) -> dict[str, float]:
    """What the replay of a run says."""
    if local := plan.get("local"):
        if "topology" in local:
            return peers.check(folder, topology=resolve(local["topology"]), outer=True)
        exact = "codec" not in plan and "fragments" not in local
        return averages.check(folder, period=local["period"], outer=True, exact=exact)
    if "rounds" in plan:
        return averages.check_rounds(loop.journals(folder))
    return checked(folder, plan) if "adam" in plan else loop.check(folder, clip=plan.get("clip"))


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"group": "HostMemory"},
        {"local": STREAMING, "codec": "int8"},
        {"rounds": {"sync_interval_ms": 30}, "sleep_s": 0.02},
        ADAMS["0/1"],
        {"sharded": {"holders": 2}, "clip": 0.5},
        {"local": PAIRS, "epochs": 2},
    ],
    ids=["gradients", "host memory", "streaming codec", "async", "0/1", "sharded", "noloco"],
)
def test_workers_whose_models_are_on_a_device_go_on_without_the_dead(fork, tmp_path, plan) -> None:
    kill = {"1": [7, "backward"], "0": [12, "after"], "3": [17, "forward"]}
    code, _, err = on_device(fork, tmp_path, ["--min-np", "1", "-np", "4"], kill=kill, **plan).finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 3
    assert replayed(tmp_path, plan)["worst"] < EXACT
    assert list(ends(tmp_path)) == [2]


def test_an_operation_on_the_device_whose_member_dies_is_aborted_and_made_again(fork, tmp_path) -> None:
    flags = ["--min-np", "1", "-np", "3"]
    code, _, err = on_device(fork, tmp_path, flags, dies_in={"1": 26}).finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 1
    result = loop.check(tmp_path)
    assert result["worst"] < EXACT
    assert sorted(ends(tmp_path)) == [0, 2]


@pytest.mark.parametrize("plan", [{}, {"local": DILOCO}], ids=["gradients", "diloco"])
def test_a_newcomer_copies_the_state_from_a_device_to_its_own(fork, tmp_path, plan) -> None:
    flags = ["--min-np", "1", "--max-np", "2", *ALL_COME_AGAIN]
    run = on_device(fork, tmp_path, flags, epochs=10**6, kill={"1": [6, "backward"]}, sleep_s=0.05, **plan)
    wait_until(lambda: lines_of(tmp_path, 2, "step") > 8)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    assert replayed(tmp_path, plan)["worst"] < EXACT
    copied = [line["copied"] for own in loop.journals(tmp_path).values() for line in own if "new" in line]
    assert copied == [True], "while the other trained"
