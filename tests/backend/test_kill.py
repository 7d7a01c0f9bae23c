"""kill -9 of random ranks at random moments: every survivor gets an error that names a dead rank, and nothing is left.

A campaign is a process that forks the ranks of one round after another (50 ms a round);
a rank makes random calls until one fails. The test reads the campaign's report, one line of JSON.
"""

import contextlib
import ctypes
import itertools
import json
import os
import random
import re
import select
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch.distributed as dist

from tests import ROOT
from tests.backend.jobs import TESTED, make_group, named_ranks, random_call
from tests.support.forks import Script

LOST = "CommError"
KILLS = 25  # of each of two campaigns; a third has 12
EARLY_TIMEOUT_S = 6.0  # a stalled rank of a loaded machine must not be taken for a missing one
LIBC = ctypes.CDLL(None)
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(TESTED == "gloo", reason="Gloo's survivors that were not talking to the dead hang"),
]


class Forked:
    """One rank in a process of its own, and the lines that it has sent so far."""

    def __init__(self, rank: int, size: int, port: int, kind: str, round_name: str, timeout_s: float) -> None:
        self.rank = rank
        self.lines: list[dict] = []
        self.rest = b""
        reading, said = os.pipe()
        listening, self.leave = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent()
            try:
                run_rank(rank, size, port, kind, round_name, timeout_s, said)
            finally:
                os.read(listening, 1)  # stays until told, so that the others do not notice its end
                os._exit(0)
        os.close(said)
        os.close(listening)
        self.reading = reading

    def listen(self, until: float, *, enough) -> None:
        """Reads lines until one has the key `enough`, the pipe is closed, or `until` has passed."""
        while not any(enough in line for line in self.lines):
            ready, _, _ = select.select([self.reading], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self.reading, 65536) if ready else b""
            if not data:
                return
            *whole, self.rest = (self.rest + data).split(b"\n")
            self.lines += [json.loads(line) for line in whole]

    def said(self, key: str):
        return next((line[key] for line in self.lines if key in line), None)

    def end(self, until: float) -> bool:
        """Tells the process to end; True if it ended by itself."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.leave, b".")  # closing it would not do: ranks forked later hold it too
        os.close(self.leave)
        os.close(self.reading)
        while time.monotonic() < until:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return True
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return False


def die_with_parent() -> None:
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def fork_store() -> tuple[int, int]:
    """The store's port and process. It has a process of its own because a fork copies the locks of its threads."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(server.port).encode())
        while True:
            signal.pause()
    port = int(os.read(reading, 100))
    os.close(reading)
    os.close(writing)
    return port, pid


def run_rank(
    rank: int, size: int, port: int, kind: str, round_name: str, timeout_s: float, said: int
) -> None:
    def say(**line) -> None:
        os.write(said, json.dumps(line).encode() + b"\n")

    group = None
    try:
        server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
        say(started=time.monotonic())
        group = make_group(kind, dist.PrefixStore(round_name, server), rank, size, timeout_s=timeout_s)
        say(built=time.monotonic())
        largest = random.Random(round_name).choice([3000, 100_000, 1_000_000])
        for key in itertools.count():
            works, check = random_call(group, key, largest=largest)
            for work in works:
                work.wait()
            check()
    except BaseException as error:
        at = time.monotonic()
        again = None
        if group is not None:
            try:
                group.barrier().wait()
            except Exception as second:
                again = f"{type(second).__name__}: {second}"
        say(at=at, kind=type(error).__name__, error=str(error), again=again, again_s=time.monotonic() - at)


def forbidden(folder: Path) -> set[str]:
    """What a backend might leave: files in its temporary folder, and shared memory. Sockets go with their processes."""
    # A test beside this one may run mpirun, whose memory is named last.
    others = ("torch_", "sem.", "vader_segment")
    shared = {name for name in os.listdir("/dev/shm") if not name.startswith(others)}
    return shared | {str(path) for path in folder.rglob("*")}


def others_in_session() -> list[str]:
    own = str(os.getsid(0))
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, after = stat.read_text().partition(" (")
        except OSError:
            continue
        if after.rsplit(") ", 1)[1].split()[3] == own and int(pid) != os.getpid():
            found.append(after)
    return found


def campaign(kind: str, seed: int, kills: int, early: bool) -> None:
    """Runs rounds until `kills` ranks were killed; `early`: even before the groups are made."""
    os.setsid()
    folder = Path(os.environ["TMPDIR"])
    before = forbidden(folder)
    draw = random.Random(seed)
    port, store = fork_store()
    rounds = []
    begun = time.monotonic()
    while sum(len(one["dead"]) for one in rounds) < kills:
        size = draw.choice([2, 3, 3, 4])
        timeout_s = EARLY_TIMEOUT_S if early else 20.0
        ranks = [Forked(rank, size, port, kind, f"{seed}.{len(rounds)}", timeout_s) for rank in range(size)]
        if early:
            # The first kill of three comes at once: it meets the construction, however fast the machine is.
            time.sleep(draw.random() * 0.08 if len(rounds) % 3 else 0)
        else:
            for rank in ranks:
                rank.listen(time.monotonic() + 20, enough="built")
            time.sleep(draw.random() ** 2 * 0.3)
        dead = draw.sample(range(size), draw.choice([1, 1, 1, 2]) if size > 2 else 1)
        killed = time.monotonic()
        for rank in dead:
            os.kill(ranks[rank].pid, signal.SIGKILL)
        survivors = []
        for rank in ranks:
            rank.listen(killed + 12, enough="at")
            if rank.rank not in dead:
                found = next((line for line in rank.lines if "at" in line), {})
                late = found["at"] - killed if found else None
                survivors.append({"rank": rank.rank, "late_s": late, **found})
        built = all(ranks[rank].said("built") for rank in dead)
        left = [rank.end(time.monotonic() + 5) for rank in ranks]
        rounds.append({"size": size, "dead": dead, "built": built, "survivors": survivors, "left": all(left)})
        print(f"{time.monotonic() - begun:.1f} s", json.dumps(rounds[-1]), file=sys.stderr, flush=True)
        if not all(left) or any(one["late_s"] is None for one in survivors):
            break  # more of the same would only hide it behind a timeout
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    until = time.monotonic() + 5
    while forbidden(folder) - before and time.monotonic() < until:
        time.sleep(0.1)  # other processes of this machine come and go
    remains = sorted(forbidden(folder) - before)
    print(json.dumps({"rounds": rounds, "remains": remains, "session": others_in_session()}))


def run_campaign(folder: Path, seed: int, kills: int, *, early: bool, kind: str = TESTED) -> dict:
    code = f"from tests.backend import test_kill; test_kill.campaign({kind!r}, {seed}, {kills}, {early})"
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    with Script(["-c", code], environment, ROOT) as script:
        try:
            status, out, err = script.finish(160)
        except TimeoutError:
            rounds = script.printed()[1][-3000:]
            pytest.fail(f"seed {seed}: the campaign takes too long; its last rounds: {rounds}")
    assert status == 0, out[-3000:] + err[-3000:]
    return json.loads(out.splitlines()[-1])


def why(error: str) -> str:
    """The cause alone, because a receive from a living rank ends when another rank dies, and its error names both."""
    return re.sub(r"^(send|receive) of .*? \(tag \d+\) failed: ", "", error)


def check_round(found: dict, seed: int, limit_s: float) -> list[float]:
    """Each survivor's delay, after its error was checked."""
    delays = []
    for survivor in found["survivors"]:
        case = f"seed {seed}: {survivor} after the end of {found['dead']}"
        assert survivor["late_s"] is not None, f"hangs: {case}"
        assert survivor["kind"] == LOST, case
        assert survivor["late_s"] < limit_s, case
        assert survivor["again"] is None or survivor["again"].startswith(LOST), case
        assert survivor["again_s"] < 1.0, case
        blamed = named_ranks(why(survivor["error"])) - {survivor["rank"]}
        assert blamed, case
        assert blamed <= set(found["dead"]), case
        delays.append(survivor["late_s"])
    assert found["left"], f"seed {seed}: a survivor could not leave after the end of {found['dead']}"
    return delays


@pytest.mark.parametrize(("kind", "seed"), [(TESTED, 11), (TESTED, 12), ("codec", 13)])
def test_survivors_of_kills_during_calls_name_the_dead_within_a_second_and_nothing_is_left(
    kind, seed, tmp_path
):
    report = run_campaign(tmp_path, seed, KILLS, early=False, kind=kind)
    delays = [delay for found in report["rounds"] for delay in check_round(found, seed, 10.0)]
    assert sum(len(found["dead"]) for found in report["rounds"]) >= KILLS
    assert median(delays) < 1.0
    assert report["remains"] == []
    assert report["session"] == []


def test_survivors_of_kills_from_the_fork_on_get_an_error_and_nothing_is_left(tmp_path):
    """Only the timeout of the constructor can notice a rank that died before any other met it."""
    report = run_campaign(tmp_path, 21, 12, early=True)
    for found in report["rounds"]:
        check_round(found, 21, EARLY_TIMEOUT_S + 6.0)
    assert not all(found["built"] for found in report["rounds"]), "no kill came during construction"
    assert report["remains"] == []
    assert report["session"] == []
