# Elastic runs with real workers that train: elastic_job.py is what they run; it knows the loss of each step.

import itertools
import json
import time
from pathlib import Path

from tests.launch import elastic_job

JOB = str(Path(elastic_job.__file__))
RUN = ["-m", "gossamer.launch.cli", "run"]
EXACT = 1e-12  # sums of 12 numbers in another order


def begin(start, folder: Path, flags: list[str], steps: int, *, env=None, prefix=(), **plan):
    argv = [*RUN, *flags, JOB, str(folder), str(steps), json.dumps(plan)]
    return start(argv, env=env, prefix=prefix)


def ends(folder: Path) -> dict[int, dict]:
    """The last line of each process that reached the end."""
    return {pid: lines[-1] for pid, lines in elastic_job.journals(folder).items() if "end" in lines[-1]}


def wait_for_step(folder: Path, step: int) -> None:
    until = time.monotonic() + 120
    while not any(
        line.get("step") == step for lines in elastic_job.journals(folder).values() for line in lines
    ):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_five_kills_are_survived_by_the_same_processes_with_the_same_losses(fork, tmp_path) -> None:
    # One is killed, then two in one step, twice, rank 0 among them: only one of the first three is left in the end.
    run = begin(
        fork,
        tmp_path,
        ["--min-np", "1", "--max-np", "3", "--blacklist-cooldown-range", "0", "0"],
        25,
        kill={"4": [1], "10": [0, 2], "18": [1, 2]},
        size={"8": 3, "15": 3, "22": 3},
    )
    code, _, err = run.finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 5
    journals = elastic_job.journals(tmp_path)
    assert elastic_job.worst_deviation(tmp_path, 25) < EXACT
    assert len(journals) == 3 + 5
    assert len(ends(tmp_path)) == 3
    for lines in journals.values():
        begins = [line for line in lines if "begin" in line]
        calls = [len(line["resets"]) for line in begins]
        assert calls[0] <= int(lines[0]["begin"] > 0), "one for a newcomer whose place was another than told"
        # One callback a new group; a group may break up before it trains, when another worker is killed.
        assert all(before < after for before, after in itertools.pairwise(calls)), calls
    first = [lines for lines in journals.values() if lines[0]["begin"] == 0]
    assert len(first) == 3
    (longest,) = (lines for lines in first if "end" in lines[-1])
    sizes = [line["size"] for line in longest if "begin" in line]
    assert sizes[:3] == [3, 2, 3]
    assert sizes[-1] == 3


def test_no_step_is_lost_but_those_after_the_last_commit(fork, tmp_path) -> None:
    env = {"HOROVOD_CPU_OPERATIONS": "gloo"}
    run = begin(
        fork, tmp_path, ["--min-np", "2", "-np", "3"], 20, env=env, kill={"8": [0]}, **{"raise": {"14": [1]}}
    )
    code, _, err = run.finish()
    assert code == 1
    assert err.splitlines()[-1] == "KeyError: 'of step 14'"
    assert "gossamer run: rank 1 failed with exit code 1" in err
    journals = elastic_job.journals(tmp_path)
    survivors = [lines for lines in journals.values() if lines[-1]["size"] == 2]
    assert len(survivors) == 2
    for lines in survivors:
        assert [(line["begin"], line["size"]) for line in lines if "begin" in line] == [(0, 3), (6, 2)]
        steps = [line["step"] for line in lines if "step" in line]
        assert steps == [*range(8), *range(6, 14)]
        (failed,) = (line["time"] for line in lines if line.get("step") == 7 and line["size"] == 3)
        again = next(line["time"] for line in lines if "begin" in line and line["size"] == 2)
        assert again - failed < 20, "seconds, on a machine with other work"


def test_workers_whose_launcher_is_killed_say_why_they_end(start, tmp_path) -> None:
    run = begin(start, tmp_path, ["--min-np", "1", "--max-np", "2"], 10**6, sleep_s=0.01)
    wait_for_step(tmp_path, 3)
    run.process.kill()
    _, out, err = run.finish(30)
    # The launcher shows what workers write; these lines come without a launcher, so the workers wrote them.
    lines = sorted(err.splitlines())
    assert len(lines) == 2, out + err
    for rank, line in enumerate(lines):
        assert f"worker {rank} (rank {rank} of 2) has lost the driver of this run" in line
        assert f"`gossamer run`, process {run.process.pid}, is gone; this worker ends" in line
    for pid in elastic_job.journals(tmp_path):
        until = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()


def test_hosts_that_come_and_go_change_the_group_without_loss(fork, tmp_path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2")
    flags = ["--min-np", "1", "--host-discovery-script", f"cat {hosts}"]
    run = begin(fork, tmp_path, flags, 14, size={"5": 3, "10": 2}, distributed=True)
    wait_for_step(tmp_path, 4)
    hosts.write_text("localhost:3")
    wait_for_step(tmp_path, 9)
    hosts.write_text("localhost:2")
    code, _, err = run.finish()
    assert code == 0, err
    assert "was killed" not in err
    assert elastic_job.worst_deviation(tmp_path, 14) < EXACT
    journals = elastic_job.journals(tmp_path)
    assert len(journals) == 3
    for lines in journals.values():
        steps = [line["step"] for line in lines if "step" in line]
        assert steps == sorted(set(steps)), "none is repeated"
    assert sorted((end["rank"], end["size"], end["end"]) for end in ends(tmp_path).values()) == [
        (0, 2, 14),
        (1, 2, 14),
    ]


def test_a_failed_attempt_to_join_leaves_no_trace_in_the_names_of_the_next_group(fork) -> None:
    # torch numbers its groups, even failed ones: a survivor would wait under another name than a new worker.
    script = """
import torch.distributed as dist
from gossamer import CommError, runtime
names = []
for attempt in range(2):
    store = dist.HashStore()
    try:
        runtime.join(store, rank=0, size=2, local_size=2, timeout_s=0.2)
    except CommError:
        names.append(sorted(key.rsplit("/", 1)[0] for key in store.list_keys()))
assert names[0] and names[0] == names[1], names
"""
    code, _, err = fork(["-c", script]).finish()
    assert code == 0, err


def test_a_worker_may_end_while_it_looks_at_the_board(fork) -> None:
    script = """
import os, time
from gossamer import membership
from gossamer.launch.elastic.board import Board
membership.WATCH_S = 0
board = Board()
host, _, port = board.endpoint.rpartition(":")
member = membership.Member(host, int(port), worker=0, launcher=os.getpid())
time.sleep(0.3)
"""
    code, _, err = fork(["-c", script]).finish()
    assert code == 0, err
