"""What listens on the hosts of a job, and where: the table of docs/security.md, row by row. Hosts are network
namespaces, so that nothing but the job listens there (and sshd)."""

import json
import os
import re
import socket

import pytest

from gossamer import netlab, stores
from gossamer.launch import addresses
from tests import ROOT
from tests.launch import sshd

unavailable = sshd.missing()
needs_hosts = pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")
pytestmark = pytest.mark.timeout(180)

RUN = ["-m", "gossamer.launch.cli", "run"]
TELL = f"""
import glob, json, os, sys, torch, torch.distributed as dist, gossamer as gs
from gossamer.launch.addresses import listeners, of_device
def tell(what, value):
    sys.stdout.write(f"{{what}} {{json.dumps(value)}}\\n")  # in one piece, as both ranks write into one pipe
gs.init(*sys.argv[1:])
gs.all_reduce(torch.ones(4))
found = [each.address for each in listeners() if each.port != {sshd.PORT}]
dist.barrier()
if gs.local_rank() == 0:
    tell("listens", [of_device('eth0'), sorted(found)])
def own():
    held = [os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.lexists(path)]
    return [each.address for each in listeners() if f"socket:[{{each.inode}}]" in held]
before = own()
gs.shutdown()
tell("closed", [len(before), len(own())])
"""
EVERY, LOOPBACK, FIRST, SECOND = "::", "127.0.0.1", "10.213.0.1", "10.213.0.2"
STORE = {EVERY: "all addresses", LOOPBACK: "127.0.0.1", FIRST: "one address of the first host"}
# By the first column of the table: the command, and the addresses of the stores, which are the second column.
LAUNCHES = {
    "`gossamer run`, one host": (RUN, [LOOPBACK]),
    "`gossamer run -H`, several hosts": ([*RUN, "-H", f"{FIRST}:2,{SECOND}:2"], [FIRST]),
    "`gossamer run --min-np`, one host": ([*RUN, "--min-np", "2"], [LOOPBACK, LOOPBACK]),
    "`gossamer run --min-np -H`, several hosts": (
        [*RUN, "--min-np", "4", "-H", f"{FIRST}:2,{SECOND}:2"],
        [FIRST] * 2,
    ),
    "torchrun": (["-m", "torch.distributed.run", "--standalone"], [EVERY, EVERY]),
}


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with netlab.Hosts(2) as hosts, sshd.Reachable(hosts, tmp_path_factory.mktemp("sshd")) as ssh:
        yield hosts, ssh


def table() -> dict[str, list[str]]:
    """The rows of the page's first table, by their first cells."""
    text = (ROOT / "docs" / "security.md").read_text().partition("## What listens")[2]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {first: rest for first, *rest in cells}


@needs_hosts
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("group", ["gossamer", "gloo"])
def test_a_job_listens_where_the_page_says_and_nowhere_else(network, fork, tmp_path, launch, group) -> None:
    hosts, ssh = network
    command, store = LAUNCHES[launch]
    several = "-H" in command
    (tmp_path / "tell.py").write_text(TELL)
    if command[:2] == RUN[:2]:
        command = [*command, "-p", str(sshd.PORT), "-i", ssh.key]
    number = "4" if several else "2"
    count = [] if several else ["--nproc-per-node", number]
    job = fork(
        [*command, *count, "tell.py", group],
        env={**ssh.env, "GLOO_SOCKET_IFNAME": netlab.DEVICE},
        prefix=hosts.prefix(0),
    )
    code, out, err = job.finish(120)
    assert code == 0, out + err
    assert "node_rank" not in err, "torchrun warns"
    found = dict(json.loads(said) for said in re.findall("listens (.*)", out))
    gloo = 0 if group == "gossamer" and not several else 2  # ports of the two ranks of a host
    assert found[FIRST] == sorted([*store, *[FIRST] * gloo]), out
    if several:
        assert found[SECOND] == [SECOND] * gloo, out
    closed = [json.loads(said) for said in re.findall("closed (.*)", out)]
    assert closed == [[int(gloo > 0), 0]] * int(number), out
    assert table()[launch][0] == STORE[store[0]]


def test_the_kernels_list_has_a_socket_of_each_family_with_its_address_and_port() -> None:
    places = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
    for family, address in places.items():
        with socket.create_server((address, 0), family=family) as server:
            port = server.getsockname()[1]
            (own,) = [each for each in addresses.listeners() if each.port == port]
            assert own.address == address
            assert os.readlink(f"/proc/self/fd/{server.fileno()}") == f"socket:[{own.inode}]"
    assert {"127.0.0.1", "::1"} <= {*addresses.of_host()}


def test_a_store_at_an_address_listens_there_alone_and_one_at_a_name_everywhere() -> None:
    def where(store) -> list[str]:
        return [each.address for each in addresses.listeners() if each.port == store.port]

    for address, expected in {"127.0.0.1": "127.0.0.1", "::1": "::1", "localhost": "::"}.items():
        store = stores.serve(address, wait_for_workers=False)
        store.set("key", "value")
        assert where(store) == [expected]


def test_a_port_that_is_taken_is_torchs_error() -> None:
    store = stores.serve("127.0.0.1", wait_for_workers=False)
    with pytest.raises(RuntimeError, match="in use"):
        stores.serve("127.0.0.1", store.port, wait_for_workers=False)
