"""An elastic run over hosts that are network namespaces, each with its own sshd (tests/launch/sshd.py)."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer import netlab
from tests import ROOT
from tests.launch import elastic_job, sshd
from tests.launch.test_elastic import EXACT, begin, ends
from tests.launch.test_plain_elastic import begin as begin_plain
from tests.launch.test_plain_elastic import lines_of, wait_until
from tests.launch.test_plain_elastic import loop as plain

unavailable = sshd.missing()


@pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")
def test_survivors_on_two_hosts_go_on_when_a_worker_of_one_dies(fork, tmp_path, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("sshd")
    with netlab.Hosts(2) as hosts, sshd.Reachable(hosts, folder) as ssh:
        listing = f"{hosts.address(0)}:1,{hosts.address(1)}:2"
        flags = ["--min-np", "2", "-H", listing, "-p", str(sshd.PORT), "-i", ssh.key]
        run = begin(fork, tmp_path, flags, 12, env=ssh.env, prefix=hosts.prefix(0), kill={"5": [1]})
        code, out, err = run.finish()
    assert code == 0, out + err
    assert (
        f"gossamer run: worker 1 (slot 0 of {hosts.address(1)}) was killed by signal 9 (SIGKILL); 2 are left"
        in err
    )
    assert elastic_job.worst_deviation(tmp_path, 12) < EXACT
    assert sorted((end["rank"], end["size"]) for end in ends(tmp_path).values()) == [(0, 2), (1, 2)]
    journals = elastic_job.journals(tmp_path)
    assert len(journals) == 3
    assert {line["local_size"] for lines in journals.values() for line in lines if line["size"] == 2} == {1}


@pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")
def test_a_plain_loop_goes_on_by_hosts_when_a_worker_of_each_host_dies(
    fork, tmp_path, tmp_path_factory
) -> None:
    kill = {"3": [5, "backward"], "0": [9, "after"]}
    with netlab.Hosts(2) as hosts, sshd.Reachable(hosts, tmp_path_factory.mktemp("sshd")) as ssh:
        listing = f"{hosts.address(0)}:2,{hosts.address(1)}:2"
        flags = ["--min-np", "1", "-H", listing, "-p", str(sshd.PORT), "-i", ssh.key]
        run = begin_plain(fork, tmp_path, flags, kill=kill, env=ssh.env, prefix=hosts.prefix(0))
        code, out, err = run.finish()
    assert code == 0, out + err
    assert err.count("was killed by signal 9 (SIGKILL)") == 2
    assert plain.check(tmp_path)["worst"] < EXACT
    assert {worker for worker, own in plain.journals(tmp_path).items() if "end" in own[-1]} == {1, 2}


@pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")
def test_the_side_with_the_driver_goes_on_when_the_network_is_cut(
    fork, tmp_path, tmp_path_factory, monkeypatch
) -> None:
    monkeypatch.setenv("GOSSAMER_STALL_SHUTDOWN_S", "2")
    script = ROOT / "tests" / "launch" / "cut_job.py"
    with netlab.Hosts(2) as hosts, sshd.Reachable(hosts, tmp_path_factory.mktemp("sshd")) as ssh:
        listing = f"{hosts.address(0)}:2,{hosts.address(1)}:1"
        flags = ["--min-np", "2", "-H", listing, "-p", str(sshd.PORT), "-i", ssh.key, "--give-up-after", "2"]
        env, prefix = ssh.env | {"PYTHONPATH": str(ROOT)}, hosts.prefix(0)
        run = begin_plain(
            fork, tmp_path, flags, epochs=10**6, sleep_s=0.05, env=env, prefix=prefix, script=script
        )
        wait_until(lambda: lines_of(tmp_path, 2, "step") > 5)
        subprocess.run([*hosts.prefix(1), "ip", "link", "set", "eth0", "down"], check=True)
        steps = lines_of(tmp_path, 0, "step")
        cut_off = Path(f"/proc/{plain.journals(tmp_path)[2][0]['pid']}")
        wait_until(lambda: lines_of(tmp_path, 0, "step") > steps + 20 and not cut_off.exists())
        run.process.send_signal(signal.SIGTERM)
        code, out, err = run.finish()
    assert code == 0, out + err
    assert "has not come back from group 1, which has failed, in 2 s" in err
    assert plain.check(tmp_path)["worst"] < EXACT
    assert {worker for worker, own in plain.journals(tmp_path).items() if "saved" in own[-1]} == {0, 1}


LOOKS = """
import os
from gossamer import stores
server = stores.serve("127.0.0.1")
server.set("key", "value")
before = sorted(os.listdir("/proc/self/fd"))
for _ in range(3):
    stores.fail_when_silent("127.0.0.1", server.port, after_s=30)
assert sorted(os.listdir("/proc/self/fd")) == before
assert server.get("key") == b"value"
"""


def test_looking_for_the_connections_of_a_store_opens_and_closes_nothing(fork) -> None:
    code, _, err = fork(["-c", LOOKS]).finish()
    assert code == 0, err


CLIENT = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from gossamer import stores
host, port = sys.argv[1], int(sys.argv[2])
store = dist.TCPStore(host, port, timeout=timedelta(seconds=60))
stores.fail_when_silent(host, port, after_s=3)
print("ready", store.get("key").decode(), flush=True)
sys.stdin.readline()  # the cable is out
begun = time.monotonic()
try:
    store.get("key")
except RuntimeError:
    print("fails", time.monotonic() - begun < 10, flush=True)
"""
SERVER = """
import sys
from gossamer import stores
store = stores.serve(sys.argv[1])
store.set("key", "value")
print(store.port, flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing() or "available")
def test_a_store_on_a_host_that_is_cut_off_fails_soon_and_not_after_a_quarter_of_an_hour() -> None:
    with netlab.Hosts(2) as hosts, contextlib.ExitStack() as stack:

        def start(host: int, script: str, *arguments: str) -> subprocess.Popen:
            command = [*hosts.prefix(host), sys.executable, "-c", script, hosts.address(0), *arguments]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        server = start(0, SERVER)
        client = start(1, CLIENT, server.stdout.readline().strip())
        assert client.stdout.readline() == "ready value\n"
        subprocess.run([*hosts.prefix(1), "ip", "link", "set", "eth0", "down"], check=True)
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "fails True\n"
