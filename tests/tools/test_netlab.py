"""The lab of slow networks: links keep to their rate in both directions, byte counts are the kernel's, and however it
ends it leaves nothing behind. Needs root and iproute2, except for the refusals.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gossamer import netlab
from gossamer.errors import ConfigError, GossamerError
from gossamer.netlab import Hosts, Shape, run_on_hosts

unavailable = netlab.missing()
needs_hosts = pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")

# Without torch, so that it starts at once. Host 0 sends to host 1, then host 1 to host 0; both time it.
FLOOD = """
import os, socket, sys, time
rank, peer, size = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(sys.argv[1])
server = socket.create_server(("0.0.0.0", 29500)) if rank == 0 else None
while True:
    try:
        link = server.accept()[0] if server else socket.create_connection((peer, 29500))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
for sender in (0, 1):
    begun = time.monotonic()
    if rank == sender:
        link.sendall(bytes(size))
        link.recv(1)
    else:
        left = size
        while left:
            left -= len(link.recv(min(left, 1 << 16)))
        link.sendall(b"x")
    print(time.monotonic() - begun)
"""
# Host 0 answers; every other host prints the shortest of some round trips.
ROUND_TRIPS = """
import os, socket, time
rank, size, peer = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), (os.environ["MASTER_ADDR"], 29501)
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if rank == 0:
    link.bind(("0.0.0.0", 29501))
    link.settimeout(20)
    left = size - 1
    while left:
        data, sender = link.recvfrom(99)
        left -= data == b"end"
        link.sendto(data, sender)
else:
    took = []
    while len(took) < 9:
        begun = time.monotonic()
        link.sendto(b"ask", peer)
        link.settimeout(1)
        try:
            link.recv(99)
            took.append(time.monotonic() - begun)
        except (TimeoutError, ConnectionRefusedError):  # host 0 has not begun
            time.sleep(0.1)
    link.sendto(b"end", peer)
    print(min(took))
"""
# Three processes that run until a signal comes; the shell leaves one in a session of its own.
BEGUN = """
from gossamer.netlab import Hosts, run_on_hosts
for _ in range(3):
    try:
        with Hosts(2, rate="100mbit") as hosts:
            print(hosts.name, flush=True)
            run_on_hosts(["sh", "-c", "sleep 300 & setsid sleep 300 & wait"], hosts)
    except KeyboardInterrupt:
        print("removed", flush=True)
"""


def namespaces(name: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(name)]


@needs_hosts
def test_a_link_keeps_to_its_rate_in_both_directions() -> None:
    def keeps() -> bool:
        seconds = {}
        for rate in ("40mbit", "80mbit"):
            outputs = run_on_hosts([sys.executable, "-c", FLOOD, "2000000"], 2, rate=rate)
            seconds[rate] = [max(float(out.stdout.split()[way]) for out in outputs) for way in (0, 1)]
        assert min(seconds["40mbit"]) >= 0.95 * 8 * 2_000_000 / 40e6
        return all(1.5 < slow / fast < 2.7 for slow, fast in zip(*seconds.values(), strict=True))

    assert any(keeps() for _ in range(4))  # TCP may pause on a busy machine


@needs_hosts
def test_a_host_receives_no_faster_than_its_link_whoever_sends() -> None:
    """Each of two senders keeps to the rate; both together would send twice the rate to one receiver."""
    code = FLOOD[: FLOOD.index("for sender")].replace(
        "server.accept()[0] if server", "(server.accept()[0], server.accept()[0]) if server"
    )
    code += """
if rank:
    link.sendall(bytes(size))
    link.recv(1)
else:
    begun, left = time.monotonic(), 2 * size
    import select
    while left:
        for ready in select.select(link, [], [])[0]:
            left -= len(ready.recv(1 << 16))
    print(time.monotonic() - begun)
    for each in link:
        each.sendall(b"x")
"""
    outputs = run_on_hosts([sys.executable, "-c", code, "1000000"], 3, rate="40mbit")
    assert float(outputs[0].stdout) >= 0.95 * 2 * 8 * 1_000_000 / 40e6


@needs_hosts
def test_every_rank_keeps_to_its_share_of_the_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    code = "import os, time; time.sleep(0.2); print(*sorted(os.sched_getaffinity(0)))"
    for hosts, per_host in ((len(cores), 1), (2, len(cores))):
        outputs = run_on_hosts([sys.executable, "-c", code], hosts, ranks_per_host=per_host)
        kept = [[int(core) for core in out.stdout.split()] for out in outputs]
        assert kept == [[cores[rank % len(cores)]] for rank in range(hosts * per_host)]


@needs_hosts
def test_ranks_find_their_places_on_the_hosts() -> None:
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GLOO_SOCKET_IFNAME",
        "MINE",
    )
    command = ["sh", "-c", "; ".join(f"echo ${name}" for name in names)]
    outputs = run_on_hosts(command, 2, ranks_per_host=2, environment={"MINE": "a b"})
    assert [out.stdout.splitlines() for out in outputs] == [
        [str(rank), str(rank % 2), "4", "2", str(rank // 2), "eth0", "a b"] for rank in range(4)
    ]
    assert [out.host for out in outputs] == [0, 0, 1, 1]


@needs_hosts
def test_packets_to_and_from_a_far_host_take_their_time() -> None:
    with Hosts(3, rate="100mbit", delays={2: 0.03}) as hosts:
        _, near, far = run_on_hosts([sys.executable, "-c", ROUND_TRIPS], hosts, timeout_s=60)
    assert float(near.stdout) < 0.03
    assert 0.06 <= float(far.stdout) < 0.12
    assert not namespaces(hosts.name)


@pytest.mark.parametrize("delays", [{3: 0.1}, {0: 0.0}, {0: 99.0}])
def test_delays_that_are_none_are_refused(delays) -> None:
    with pytest.raises(
        ConfigError, match=r"delays must give hosts 0 to 2 seconds above 0 and below 60, got \{"
    ):
        Hosts(3, delays=delays)


@needs_hosts
def test_a_rank_that_fails_is_named_the_others_end_and_the_hosts_are_removed() -> None:
    script = 'if [ $RANK = 1 ]; then echo "no such data" >&2; exit 3; fi; sleep 300'
    begun = time.monotonic()
    with (
        Hosts(2) as hosts,
        pytest.raises(GossamerError, match=r"rank 1 on host 1 ended with exit code 3(.|\n)*no such data"),
    ):
        run_on_hosts(["sh", "-c", script], hosts)
    assert time.monotonic() - begun < 30
    assert namespaces(hosts.name) == []
    with pytest.raises(GossamerError, match=r"rank 0 on host 0 took more than 0.3 s"):
        run_on_hosts(["sleep", "300"], 1, timeout_s=0.3)
    assert namespaces(f"gs{os.getpid()}x") == []


@needs_hosts
def test_a_signal_removes_the_hosts_and_all_that_ran_on_them(start) -> None:
    begun = start(["-c", BEGUN])
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        name = begun.process.stdout.readline().strip()
        deadline = time.monotonic() + 60
        while sum(len(pids(f"{name}-{host}")) == 3 for host in (0, 1)) < 2:  # the shell and both sleeps
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running = [pid for host in (0, 1) for pid in pids(f"{name}-{host}")]
        begun.process.send_signal(ending)
        assert begun.process.stdout.readline() == "removed\n", ending
        assert namespaces(name) == []
        while any(runs(pid) for pid in running):  # a killed process leaves its namespace before it ends
            assert time.monotonic() < deadline
            time.sleep(0.01)
    code, _, err = begun.finish(30)
    assert code == 0, err


def runs(pid: str) -> bool:
    """Whether the process runs. A zombie, which only its parent can remove, does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(namespace: str) -> list[str]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return found.stdout.split()


def test_another_user_than_root_is_refused_and_told_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root, got user id 1000; run it with sudo" in netlab.missing()
    with pytest.raises(ConfigError, match="need root, got user id 1000; run it with sudo"), Hosts(2):
        pass


def test_without_iproute2_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert netlab.missing() == "network namespaces need ip; install iproute2"
    with pytest.raises(ConfigError, match="need ip; install iproute2"), Hosts(1):
        pass


@pytest.mark.parametrize("rate", ["fast", "0mbit", "-1mbit", "100"])
def test_a_rate_that_is_none_is_refused_with_its_text(rate) -> None:
    with pytest.raises(ConfigError, match=f"rate: must be a number above 0 .*got '{rate}'"):
        Hosts(2, rate=rate)


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="count must be 1 to 250, got 0"):
        Hosts(0)
    with pytest.raises(ConfigError, match="ranks_per_host must be at least 1, got 0"):
        run_on_hosts(["true"], 2, ranks_per_host=0)
    with pytest.raises(ConfigError, match="have a rate of 1gbit already, got rate='2gbit'"):
        run_on_hosts(["true"], Hosts(2, rate="1gbit"), rate="2gbit")


@pytest.mark.parametrize(("rate", "burst"), [("50mbit", 16_384), ("100mbit", 16_384), ("1gbit", 125_000)])
def test_the_bucket_holds_a_millisecond_and_no_packet_is_larger(rate, burst) -> None:
    shape = Shape(rate)
    assert shape.burst_bytes == burst
    assert shape.packet_bytes < shape.burst_bytes
    assert str(burst) in shape.qdisc("eth0")
