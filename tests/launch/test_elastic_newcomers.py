# A worker that comes while others train: they go on without it until it is ready. All but the last have real workers.

import os
import signal
import time

import pytest

from gossamer import ConfigError, late_entry, runtime
from gossamer.launch.elastic.newcomers import Newcomers
from tests.launch import elastic_job
from tests.launch.test_elastic import EXACT, begin, ends, wait_for_step

ENDLESS = 10**6


class Grown:
    """A run of `first` workers that train, on a host that gets another slot."""

    def __init__(self, start, folder, *, first: int = 2, **plan) -> None:
        self.folder, self.hosts = folder, folder / "hosts"
        self.hosts.write_text(f"localhost:{first}")
        flags = ["--min-np", "1", "--host-discovery-script", f"cat {self.hosts}"]
        plan = {"sleep_s": 0.02, "commit_every": 1, "until": str(folder / "end")} | plan
        self.run = begin(start, folder, flags, ENDLESS, **plan)
        wait_for_step(folder, 3)
        self.old = set(elastic_job.journals(folder))
        self.hosts.write_text(f"localhost:{first + 1}")

    def wait_for(self, what: str, **values) -> dict:
        """Waits for the first line of a newcomer that says `what` with these values, and returns it."""
        until = time.monotonic() + 120
        while True:
            for pid, lines in elastic_job.journals(self.folder).items():
                for line in lines:
                    if pid not in self.old and what in line and values.items() <= line.items():
                        return line | {"pid": pid}
            assert time.monotonic() < until
            assert self.run.process.poll() is None, self.run.finish()[2]
            time.sleep(0.1)

    def end(self) -> str:
        """Checks that the run has ended well and every loss is right; returns what it printed on stderr."""
        (self.folder / "end").touch()
        code, _, err = self.run.finish()
        assert code == 0, err
        lines = [line for journal in elastic_job.journals(self.folder).values() for line in journal]
        steps = 1 + max(line["step"] for line in lines if "step" in line)
        assert elastic_job.worst_deviation(self.folder, steps) < EXACT
        return err

    def old_lines(self, what: str) -> list[list[dict]]:
        found = elastic_job.journals(self.folder)
        return [[line for line in found[pid] if what in line] for pid in self.old]


@pytest.mark.parametrize("act", ["", "collective"])
def test_the_others_train_while_a_newcomer_gets_ready(fork, tmp_path, act) -> None:
    run = Grown(fork, tmp_path, newcomer=[3, act])
    entered = run.wait_for("begin")
    (told,) = (line for line in elastic_job.journals(tmp_path)[entered["pid"]] if "told" in line)
    run.wait_for("step", size=3)
    err = run.end()
    assert err == ""
    assert (told["rank"], told["size"], told["local_size"]) == (2, 3, 3)
    assert (entered["rank"], entered["size"], entered["resets"]) == (2, 3, []), "the place that it was told"
    assert entered["begin"] > 3, "it goes on from the others' state"
    assert len(ends(tmp_path)) == 3
    for steps in run.old_lines("step"):
        meanwhile = [line for line in steps if told["time"] < line["time"] < told["time"] + 3]
        assert len(meanwhile) > 10
        assert {line["size"] for line in meanwhile} == {2}
        numbers = [line["step"] for line in steps]
        assert numbers == sorted(set(numbers)), "none is repeated"


@pytest.mark.parametrize(
    ("act", "how"), [("kill", "was killed by signal 9 (SIGKILL)"), ("raise", "failed with exit code 1")]
)
def test_a_newcomer_that_dies_before_it_is_ready_is_not_noticed(fork, tmp_path, act, how) -> None:
    run = Grown(fork, tmp_path, newcomer=[0.5, act])
    dead = run.wait_for("told")["pid"]
    wait_for_end_of(dead)
    last = max(line["step"] for steps in run.old_lines("step") for line in steps)
    wait_for_step(tmp_path, last + 50)
    err = run.end()
    assert f"worker 2 (slot 2 of localhost) {how} before it took part; 2 are left" in err
    assert [len(begins) for begins in run.old_lines("begin")] == [1, 1], "they have never left their group"


def wait_for_end_of(pid: int) -> None:
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_newcomer_that_is_not_ready_when_the_others_end_ends_well(fork, tmp_path) -> None:
    run = Grown(fork, tmp_path, newcomer=[600, ""])
    newcomer = run.wait_for("told")["pid"]
    assert run.end() == ""
    assert not os.path.exists(f"/proc/{newcomer}")
    assert len(ends(tmp_path)) == 2


def test_a_newcomer_never_stands_in_for_a_rank_0_that_has_died(fork, tmp_path) -> None:
    # It had rank 1 at first, so it has not loaded what its script loads on rank 0.
    run = Grown(fork, tmp_path, first=1, newcomer=[600, ""])
    run.wait_for("told")
    (old,) = run.old
    os.kill(old, signal.SIGKILL)
    anew = run.wait_for("begin")
    err = run.end()
    assert (anew["rank"], anew["size"], anew["begin"]) == (0, 1, 0)
    told = [line for line in elastic_job.journals(tmp_path)[anew["pid"]] if "told" in line]
    assert [(line["rank"], line["size"]) for line in told] == [(0, 1)]
    assert "worker 1 starts again: all that it was to join are dead" in err


def test_gossamers_own_calls_take_a_newcomer_in() -> None:
    entered = []
    late_entry.on_need(lambda: bool(entered.append(1)))
    try:
        for call in (runtime.rank, runtime.size, lambda: runtime.join(None, rank=1, size=1, local_size=1)):
            with pytest.raises(ConfigError):
                call()
    finally:
        late_entry.on_need(None)
    assert len(entered) == 3


class Answers:
    """Stands for a Board."""

    def answer(self, worker: int, seats: object) -> None:
        pass


def test_newcomers_that_are_ready_at_about_the_same_time_come_in_together() -> None:
    now = 0.0
    newcomers = Newcomers(Answers(), clock=lambda: now)
    newcomers.preparing = {3, 4}
    assert not newcomers.gathered([])
    assert not newcomers.gathered([3])
    now = 1.0
    assert not newcomers.gathered([3])
    assert newcomers.gathered([3, 4])
    now = 2.5
    assert newcomers.gathered([3]), "but none waits long for another"
    assert not newcomers.gathered([])
    assert not newcomers.gathered([4]), "each wait is counted anew"
