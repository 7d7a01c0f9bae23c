"""`gossamer run -H` with hosts that are network namespaces, each with its own sshd (tests/launch/sshd.py)."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from gossamer import netlab
from tests.launch import sshd

RUN = ["-m", "gossamer.launch.cli", "run"]
unavailable = sshd.missing()
needs_hosts = pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")
pytestmark = pytest.mark.timeout(180)

NASTY = """a'b "c" $HOME `id` \\ é;*! #"""
REDUCE = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "FUSION_THRESHOLD")
print(total.item(), *(os.environ["HOROVOD_" + name] for name in names))
print("says", sys.argv[1:], repr(os.environ["NASTY"]), os.getcwd())
print("to stderr", file=sys.stderr)
dist.destroy_process_group()
"""
WAIT = """
import os, sys, time
rank = os.environ["HOROVOD_RANK"]
open(f"pid{rank}.part", "w").write(str(os.getpid()))
os.rename(f"pid{rank}.part", f"pid{rank}")
while rank == sys.argv[1] and not all(os.path.exists(f"pid{other}") for other in range(int(sys.argv[2]))):
    time.sleep(0.05)
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
assert rank != sys.argv[1], "boom"
time.sleep(120)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with netlab.Hosts(3) as hosts, sshd.Reachable(hosts, tmp_path_factory.mktemp("sshd")) as ssh:
        yield hosts, ssh


@pytest.fixture
def run_hosts(network, fork, tmp_path):
    """Starts `gossamer run` on host 0 of the network, with these slots of hosts 0, 1, ..."""
    hosts, ssh = network

    def run(slots, *arguments, script, env=None, start=fork):
        (tmp_path / "train.py").write_text(script)
        listing = ",".join(f"{hosts.address(host)}:{count}" for host, count in slots)
        flags = ["-H", listing, "-p", str(sshd.PORT), "-i", ssh.key]
        return start([*RUN, *flags, *arguments], env={**ssh.env, **(env or {})}, prefix=hosts.prefix(0))

    return run


def pids(folder: Path, count: int) -> list[int]:
    """The ids of the workers that run WAIT, once all have begun."""
    files = [folder / f"pid{rank}" for rank in range(count)]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "workers did not start"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def of_the_run(folder: Path) -> list[str]:
    """Command lines of processes whose working directory is the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.path.samefile(process / "cwd", folder):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def await_none_left(folder: Path, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while left := of_the_run(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@needs_hosts
def test_workers_of_three_hosts_with_unequal_slots_reduce_and_know_their_places(run_hosts, network, tmp_path):
    hosts, _ = network
    flags = [
        "-np",
        "4",
        "--fusion-threshold-mb",
        "2",
        "-x",
        f"NASTY={NASTY}",
        "--verbose",
        "--output-filename",
        "o",
    ]
    job = run_hosts([(0, 2), (1, 1), (2, 3)], *flags, "train.py", "-np", NASTY, script=REDUCE)
    code, out, err = job.finish()
    assert code == 0, out + err
    first, second, third = (hosts.address(host) for host in range(3))
    places = [f"0 4 0 2 0 3 {first}", f"1 4 1 2 0 1 {first}", f"2 4 0 1 1 3 {second}", f"3 4 0 1 2 3 {third}"]
    for rank, place in enumerate(places):
        assert f"[{rank}] 10.0 {place} {2 << 20}\n" in out
        assert f"[{rank}] says {['-np', NASTY]} {NASTY!r} {tmp_path}\n" in out
        assert f"[{rank}] to stderr" in err
        assert f"10.0 {place}" in (tmp_path / "o" / f"rank.{rank}" / "stdout").read_text()
        assert "to stderr\n" in (tmp_path / "o" / f"rank.{rank}" / "stderr").read_text()
    assert f"host {first}: rank 0-1 (here)" in err
    assert re.search(rf"host {third}: rank 3 \(ssh .*-p {sshd.PORT} .*{third}\)", err)
    assert of_the_run(tmp_path) == []


@needs_hosts
def test_a_failing_rank_of_another_host_ends_all_and_its_traceback_comes_last(run_hosts, network, tmp_path):
    job = run_hosts([(1, 1), (2, 1)], "--max-restarts", "1", "train.py", "1", "2", script=WAIT)
    code, out, err = job.finish(90)
    assert code == 1, err
    assert [line for line in out.splitlines() if line.startswith("[1]")] == ["[1] attempt 0", "[1] attempt 1"]
    tail = err[err.rindex("gossamer run: rank") :].splitlines()
    assert tail[0].startswith("gossamer run: rank 1 failed with exit code 1")
    assert tail[-1] == "AssertionError: boom"
    await_none_left(tmp_path, within_s=0)


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_the_workers_of_all_hosts(run_hosts, tmp_path, number) -> None:
    job = run_hosts([(0, 1), (1, 2)], "train.py", "none", script=WAIT)
    pids(tmp_path, 3)
    job.process.send_signal(number)
    code, _, err = job.finish(60)
    if number == signal.SIGINT:
        assert code == 130
        assert err.splitlines()[-1] == "gossamer run: stopped by SIGINT; all workers ended"
    await_none_left(tmp_path, within_s=0 if number == signal.SIGINT else 30)


@needs_hosts
def test_a_host_that_is_lost_is_named(run_hosts, network, start, tmp_path) -> None:
    hosts, _ = network
    job = run_hosts([(0, 1), (1, 1)], "train.py", "none", script=WAIT, start=start)
    worker = pids(tmp_path, 2)[1]
    agent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    code, _, err = job.finish(60)
    assert code == 1
    assert f"gossamer run: host {hosts.address(1)} is lost: ssh ended with code" in err.splitlines()[-1]
    await_none_left(tmp_path, within_s=0)


@needs_hosts
@pytest.mark.parametrize(
    ("port", "words"), [("2223", "Connection refused"), (str(sshd.PORT), "")], ids=["refused", "silent"]
)
def test_a_host_that_cannot_be_reached_is_named_in_time(network, fork, port, words) -> None:
    hosts, ssh = network
    address = hosts.address(1) if words else "10.213.0.99"
    flags = ["-H", f"{address}:1", "-p", port, "-i", ssh.key, "--start-timeout", "5"]
    began = time.monotonic()
    code, _, err = fork([*RUN, *flags, "train.py"], env=ssh.env, prefix=hosts.prefix(0)).finish(60)
    assert code == 1
    assert time.monotonic() - began < 30
    assert re.search(rf"gossamer run: host {address}: (ssh ended with code 255|not ready after 5 s)", err)
    assert words in err


CALLS = """
import os, sys
from gossamer import horovod

def place(number):
    return os.environ["HOROVOD_HOSTNAME"], int(os.environ["RANK"]) * number

settings = dict(num_proc=2, hosts=sys.argv[1], ssh_port=int(sys.argv[2]), ssh_identity_file=sys.argv[3])
print(horovod.run(place, (5,), **settings))
"""


@needs_hosts
def test_a_function_runs_on_other_hosts_and_its_results_come_back(network, fork, tmp_path) -> None:
    hosts, ssh = network
    (tmp_path / "calls.py").write_text(CALLS)
    first, second = hosts.address(1), hosts.address(2)
    arguments = ["calls.py", f"{first}:1,{second}:1", str(sshd.PORT), ssh.key]
    code, out, err = fork(arguments, env=ssh.env, prefix=hosts.prefix(0)).finish(90)
    assert code == 0, err
    assert out == f"[('{first}', 0), ('{second}', 5)]\n"
    await_none_left(tmp_path, within_s=0)
