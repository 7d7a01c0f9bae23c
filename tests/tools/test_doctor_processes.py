# `gossamer doctor` as a command: on this machine, inside a job, between hosts that differ (network namespaces), and
# where the group cannot be joined. The checks alone are in test_doctor.py.

import json
import subprocess

import pytest

from gossamer import netlab
from gossamer.doctor.rows import ERROR, OK, WARNING
from gossamer.launch.cli import main as gossamer
from tests import ROOT
from tests.support import quick_python

CODE = "import sys; from gossamer.launch.cli import main; print(main(['doctor', '--json', *sys.argv[1:]]))"
unavailable = netlab.missing()


def test_this_machine_alone_gets_a_table_and_json(capsys, monkeypatch) -> None:
    monkeypatch.setenv("GOSSAMER_BUKET_BYTES", "1")
    assert gossamer(["doctor"]) == 1
    table = capsys.readouterr().out
    assert "GOSSAMER_BUKET_BYTES" in table
    assert "1 error" in table.splitlines()[-1]
    monkeypatch.delenv("GOSSAMER_BUKET_BYTES")
    assert gossamer(["doctor", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {tuple(row) for row in rows} == {("check", "status", "finding", "advice")}


def test_workers_that_cannot_be_started_are_a_finding_beside_those_of_this_machine(capsys) -> None:
    assert gossamer(["doctor", "--json", "-np", "3", "-H", "localhost:2"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "-np must be from 1 to the 2 slots" in rows[0]["finding"]
    assert [row["status"] for row in rows if row["check"] == "versions"] == [OK]


def test_inside_a_job_rank_0_tells_of_all(fork) -> None:
    argv = ["-m", "gossamer", "run", "-np", "2", "-m", "gossamer.doctor", "--json"]
    code, out, err = fork(argv).finish()
    assert code == 0, out + err
    rows = [json.loads(line.removeprefix("[0] ")) for line in out.splitlines()]
    assert rows[0]["finding"] == "2 ranks on 1 host met"
    pair = next(row for row in rows if row["check"] == "pair")
    assert "rank 0 and 1 of" in pair["finding"]
    assert next(row for row in rows if row["check"] == "same host")["status"] == OK
    levels = next(row for row in rows if row["check"] == "levels")
    assert levels["finding"] == "1 host x 2 ranks: a model sums in one level"


def examine(hosts: netlab.Hosts, *arguments: str, device: str) -> tuple[int, list[dict]]:
    """Runs `gossamer doctor` with one rank on each host, Gloo on `device`. Returns rank 0's exit code and rows."""
    variables = {"PYTHONPATH": str(ROOT / "python"), "GLOO_SOCKET_IFNAME": device}
    ranks = netlab.run_on_hosts(
        [quick_python.program(), "-c", CODE, *arguments], hosts, environment=variables, timeout_s=150
    )
    assert [rank.stdout for rank in ranks[1:]] == ["0\n"], "rank 0 alone prints"
    *rows, code = [json.loads(line) for line in ranks[0].stdout.splitlines()]
    return code, rows


@pytest.mark.timeout(180)
@pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")
def test_a_store_and_gloo_on_a_public_address_are_warnings_and_gossamer_run_keeps_the_store_off_it(
    fork,
) -> None:
    def examine_with(*launcher: str, device: str) -> list[str]:
        argv = ["-m", *launcher, "-m", "gossamer.doctor", "--json", "--no-network"]
        job = fork(argv, env={"GLOO_SOCKET_IFNAME": device}, prefix=hosts.prefix(0))
        code, out, err = job.finish(120)
        assert code == 0, out + err
        rows = [json.loads(line[line.index("{") :]) for line in out.splitlines() if "{" in line]
        return [
            row["finding"] for row in rows if row["check"] == "public address" and row["status"] == WARNING
        ]

    with netlab.Hosts(1) as hosts:  # nothing leaves the namespace
        space = ["ip", "-n", hosts.namespace(0)]
        for command in (
            "link add wan type veth peer name wan2", "address add 8.8.8.8/24 dev wan", "link set wan up",
            "link set wan2 up",
        ):  # fmt: skip
            subprocess.run([*space, *command.split()], check=True, timeout=30)
        torchs = examine_with("torch.distributed.run", "--standalone", "--nproc-per-node", "2", device="eth0")
        ours = examine_with("gossamer", "run", "-np", "2", device="eth0")
        gloo = examine_with("gossamer", "run", "-np", "2", device="wan")
    assert any("the store listens on [::]:" in finding and "8.8.8.8" in finding for finding in torchs), torchs
    assert ours == []
    assert len(gloo) == 1
    assert "Gloo listens on 8.8.8.8 (wan), a public address" in gloo[0]


@pytest.mark.timeout(180)
@pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")
def test_hosts_with_different_mtu_and_names_that_are_loopback_addresses_are_found() -> None:
    with netlab.Hosts(2) as hosts:
        narrow = ["ip", "-n", hosts.namespace(1), "link", "set", netlab.DEVICE, "mtu", "1400"]
        subprocess.run(narrow, check=True, timeout=30)
        code, rows = examine(hosts, device=netlab.DEVICE)
        assert code == 0, rows
        (mtu,) = [row for row in rows if row["check"] == "MTU"]
        assert mtu["status"] == WARNING
        assert "eth0 1500" in mtu["finding"]
        assert "eth0 1400" in mtu["finding"]
        assert "mtu 1400" in mtu["advice"]
        assert [row["status"] for row in rows if row["check"] in ("group", "interface", "clocks")] == [
            OK,
            OK,
            OK,
        ]
        (pair,) = [
            row["finding"] for row in rows if row["check"] == "pair"
        ]  # how fast depends on the machine's load
        assert "bit/s there" in pair

        code, rows = examine(hosts, "--timeout", "3", device="lo")
        assert code == 1
        interface = [row for row in rows if row["check"] == "interface"]
        assert [row["status"] for row in interface] == [ERROR, ERROR]
        assert "GLOO_SOCKET_IFNAME=eth0" in interface[0]["advice"]
        assert rows[0]["check"] == "group"
        assert rows[0]["status"] == ERROR
        assert "could not join" in rows[0]["finding"]
