# The inputs of the elastic driver's decisions: slots and their pauses, hosts and their script, local ranks, flags.

import threading
import time

import pytest

from gossamer.errors import ConfigError
from gossamer.launch import run
from gossamer.launch.elastic import command
from gossamer.launch.elastic.slots import Discovery, Slot, Slots, parse_hosts, seats


def test_local_ranks_follow_the_slots_where_they_can() -> None:
    found = seats({3: Slot("a", 0), 5: Slot("a", 3), 6: Slot("b", 1), 7: Slot("a", 1)})
    assert [found[number]["local_rank"] for number in (3, 5, 6, 7)] == [0, 2, 0, 1]
    assert [found[number]["local_size"] for number in (3, 5, 6, 7)] == [3, 3, 1, 3]
    assert [found[number]["node_rank"] for number in (3, 5, 6, 7)] == [0, 0, 1, 0]
    assert [found[number]["rank"] for number in (3, 5, 6, 7)] == [0, 1, 2, 3]


def test_a_slot_rests_longer_after_each_failure_up_to_a_limit() -> None:
    now = 0.0
    slots = Slots({"a": 2}, (10, 30), clock=lambda: now)
    slot, other = Slot("a", 0), Slot("a", 1)
    rests = []
    for _ in range(4):
        slots.fail(slot)
        failed_at = now
        assert slots.usable() == [other]
        while slot not in slots.usable():
            now += 0.5
        rests.append(now - failed_at)
    assert 10 <= rests[0] <= 13
    assert 20 <= rests[1] <= 25.5
    assert rests[2:] == [30, 30]
    forever = Slots({"a": 2}, None)
    forever.fail(slot)
    assert forever.usable() == [other]
    assert (forever.at_most(), slots.at_most()) == (1, float("inf"))


def test_hosts_are_read_line_by_line() -> None:
    assert parse_hosts("b:2\n\n a \nc:0\n", default_slots=4) == {"b": 2, "a": 4, "c": 0}
    for text in ("a", "a:x", ":3", "a:1\na:2", "a:-1"):
        with pytest.raises(ConfigError, match="each line must be host:slots"):
            parse_hosts(text, default_slots=None)


def test_a_discovery_script_must_work_at_first_and_may_fail_later(tmp_path, capfd) -> None:
    with pytest.raises(ConfigError, match=r"'exit 3' ended with code 3"):
        Discovery("exit 3", default_slots=None)
    hosts = tmp_path / "hosts"
    hosts.write_text("a:1")
    discovery = Discovery(f"cat {hosts}", default_slots=None)
    hosts.rename(tmp_path / "away")
    said = threading.Event()
    until = time.monotonic() + 10
    err = ""
    while "the hosts known before are kept" not in err and time.monotonic() < until:
        said.wait(0.1)
        err += capfd.readouterr().err
    assert discovery() == {"a": 1}
    hosts.write_text("a:2")
    while discovery() != {"a": 2} and time.monotonic() < until:
        said.wait(0.1)
    assert discovery() == {"a": 2}


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        (["-H", "localhost:2"], "127.0.0.1"),
        (["-H", "localhost:2,no-such-host.invalid:2"], None),
        (["-H", "no-such-host.invalid:2", "--network-interfaces", "lo"], "127.0.0.1"),
        (["--host-discovery-script", "echo localhost:1"], None),
        (["--host-discovery-script", "echo localhost:1", "--network-interfaces", "lo"], "127.0.0.1"),
    ],
)
def test_the_driver_listens_on_one_address_where_all_hosts_reach_the_same(flags, address) -> None:
    args = run.build_parser("gossamer run").parse_args(["--min-np", "1", *flags, "train.py"])
    assert command._address(args, command._plan(args)[0]) == address


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-np", "3", "--max-np", "2"], "1 <= --min-np <= -np <= --max-np, got 3, 3 and 2"),
        (["--min-np", "0"], "got 0, 0 and None"),
        (["--min-np", "2", "-np", "gpu"], "-np must be a number in an elastic run, got 'gpu'"),
        (["--min-np", "1", "--blacklist-cooldown-range", "5", "2"], "needs 0 <= MIN <= MAX"),
        (["--min-np", "1", "--elastic-timeout", "0"], "--elastic-timeout must be above 0 s, got 0"),
        (
            ["--min-np", "1", "--give-up-after", "0"],
            "--give-up-after must be above 0 s and at most --elastic-timeout",
        ),
        (["--min-np", "1", "--give-up-after", "700"], "at most --elastic-timeout, 600 s, got 700"),
        (["--min-np", "1", "--reset-limit", "-1"], "--reset-limit must be at least 0, got -1"),
        (["--min-np", "1", "--max-restarts", "3"], "--max-restarts does not go with an elastic run, got 3"),
        (["--reset-limit", "2", "--nnodes", "2"], "--nnodes does not go with an elastic run, got '2'"),
        (["--host-discovery-script", "echo a"], "each line must be host:slots"),
        (["--host-discovery-script", "echo a:1", "-H", "b:1"], "--host-discovery-script excludes -H"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, message) -> None:
    args = run.build_parser("gossamer run").parse_args([*flags, "train.py"])
    assert command.asked_for(args)
    with pytest.raises(ConfigError, match=message):
        command.start(args, ["--", "train.py"])
