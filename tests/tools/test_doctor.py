# The checks of `gossamer doctor`, each alone, on made-up facts, and the effect of a broken check on the others. The
# command is in test_doctor_processes.py.

import copy

import pytest

from gossamer.config import Placement
from gossamer.doctor import checks, exposure, facts, machine, meeting, network, software, variables
from gossamer.doctor.rows import ERROR, OK, WARNING, Job, Pair

ETH0 = {"name": "eth0", "address": "10.0.0.1", "mtu": 1500, "loopback": False}
LO = {"name": "lo", "address": "127.0.0.1", "mtu": 65536, "loopback": True}
GOOD = {
    "placement": {"source": "torchrun", "rank": 0, "size": 1, "local_rank": 0, "local_size": 1},
    "host": {"name": "a", "id": "a"},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "gossamer": "0.1.0"},
    "extension": {"file": "_C.so", "cuda": False, "instruction_set": "avx2", "works": True},
    "cuda": {"available": False, "built_for": None, "driver": None, "devices": []},
    "nccl": {"available": False, "version": None},
    "interfaces": [LO, ETH0],
    "resolved": ["10.0.0.1"],
    "addresses": ["127.0.0.1", "10.0.0.1", "::1", "fe80::1"],
    "listening": [{"what": "store", "address": "::", "port": 29500}],
    "towards_master": "10.0.0.1",
    "shared_memory": {"bytes": 1 << 34, "free": 1 << 33},
    "cores": {"usable": 8, "quota": None, "threads": 8},
    "open_files": {"soft": 65536, "hard": 65536},
    "environment": {},
    "refused_settings": None,
    "ssh": "/usr/bin/ssh",
}
GPU = {"available": True, "built_for": "12.8", "driver": "570.1", "devices": ["H100"]}


def rank(name: str = "a", **changes) -> dict:
    """The facts of a rank on the host `name`; everything is right except the changes."""
    return copy.deepcopy(GOOD) | {"host": {"name": name, "id": name}} | changes


def two(**changes) -> Job:
    """Two hosts of one rank; the second has the changes."""
    return Job([rank("a"), rank("b", **changes)])


def found(rows) -> list[tuple[str, str]]:
    return [(row.status, row.finding) for row in rows]


def one(rows):
    (row,) = rows
    return row


def test_hosts_that_are_as_they_should_be_get_no_warning() -> None:
    rows = checks.run(two())
    assert {row.status for row in rows} == {OK}, found(rows)
    assert {row.check for row in rows} == set(checks.CHECKS) - {"clocks", "pair", "same host"}  # not measured


FAULTS = {  # the facts of a rank on the second host, the check, the status, a part of the finding, a part of the advice
    "torch": (
        {"versions": GOOD["versions"] | {"torch": "2.12.0"}},
        software.versions, ERROR, "2.12.0 on rank 1", "same torch",
    ),
    "python": (
        {"versions": GOOD["versions"] | {"python": "3.12.1"}},
        software.versions, ERROR, "3.12 on rank 1", "one version of Python",
    ),
    "broken extension": (
        {"extension": GOOD["extension"] | {"works": False}},
        software.extension, ERROR, "rank 1: _C.so", "--no-build-isolation",
    ),
    "extension without CUDA": (
        {"cuda": GPU}, software.extension, ERROR, "rank 1: torch sees a GPU", "GOSSAMER_BUILD_CUDA=1",
    ),
    "GPU on one host": ({"cuda": GPU}, software.cuda, ERROR, "a 0, b 1", "leave out the hosts"),
    "driver, no GPU": (
        {"cuda": GPU | {"available": False, "devices": []}},
        software.cuda, WARNING, "driver 570.1", "CUDA_VISIBLE_DEVICES",
    ),
    "no NCCL": ({"cuda": GPU}, software.nccl, ERROR, "without NCCL", "torch for CUDA"),
    "loopback name": (
        {"resolved": ["127.0.1.1", "10.0.0.1"]},
        network.interface, ERROR, "b: the host's name means 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0",
    ),
    "no name": ({"resolved": []}, network.interface, ERROR, "has no address", "GLOO_SOCKET_IFNAME=eth0"),
    "old address": (
        {"resolved": ["10.0.0.9"]}, network.interface, ERROR, "10.0.0.9, which is no address", "eth0",
    ),
    "device that is not there": (
        {"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, network.interface, ERROR, "there are lo, eth0", "eth0",
    ),
    "loopback device": (
        {"environment": {"GLOO_SOCKET_IFNAME": "lo"}}, network.interface, ERROR, "is a loopback device", "eth0",
    ),
    "Gloo on a public address": (
        {
            "interfaces": [LO, ETH0 | {"address": "8.8.8.8"}],
            "environment": {"GLOO_SOCKET_IFNAME": "eth0"},
            "addresses": ["10.0.0.1", "8.8.8.8"],
            "listening": [],
        },
        exposure.exposed, WARNING, "b: Gloo listens on 8.8.8.8 (eth0), a public address", "GLOO_SOCKET_IFNAME",
    ),
    "store on all addresses of a host with a public one": (
        {"addresses": ["10.0.0.1", "8.8.8.8", "2001:4860::8"]},
        exposure.exposed, WARNING, "b: the store listens on [::]:29500, so on the public 8.8.8.8, 2001:4860::8",
        "gossamer run",
    ),
    "launcher on a public address": (
        {"addresses": ["8.8.8.8"], "listening": [{"what": "launcher", "address": "8.8.8.8", "port": 1}]},
        exposure.exposed, WARNING, "the launcher listens on 8.8.8.8:1, so on the public 8.8.8.8", "firewall",
    ),
    "MTU": (
        {"interfaces": [LO, ETH0 | {"mtu": 9000}]},
        network.mtu, WARNING, "a eth0 1500, b eth0 9000", "on b: ip link set dev eth0 mtu 1500",
    ),
    "launcher's count": (
        {"placement": GOOD["placement"] | {"local_size": 2}},
        network.sharing, WARNING, "b: 1 ranks run here, and the launcher counted 2", "LOCAL_WORLD_SIZE",
    ),
    "no /dev/shm": ({"shared_memory": None}, machine.shared_memory, WARNING, "b: no /dev/shm", "tmpfs"),
    "Docker's /dev/shm": (
        {"shared_memory": {"bytes": 64 << 20, "free": 60 << 20}},
        machine.shared_memory, WARNING, "64 MiB", "--shm-size",
    ),
    "full /dev/shm": (
        {"shared_memory": {"bytes": 1 << 34, "free": 1 << 20}}, machine.shared_memory, ERROR, "1 MiB free", "delete",
    ),
    "too many threads": (
        {"cores": {"usable": 8, "quota": None, "threads": 16}},
        machine.cores, WARNING, "16 threads each on 8 cores", "OMP_NUM_THREADS=8",
    ),
    "a container's share": (
        {"cores": {"usable": 8, "quota": 2.0, "threads": 8}}, machine.cores, WARNING, "on 2 cores", "OMP_NUM_THREADS=2",
    ),
    "torchrun's one thread": (
        {"cores": {"usable": 8, "quota": None, "threads": 1}}, machine.cores, WARNING, "stay idle", "OMP_NUM_THREADS=8",
    ),
    "few files": ({"open_files": {"soft": 256, "hard": 4096}}, machine.open_files, ERROR, "256 files", "ulimit -n"),
    "fewer files": (
        {"open_files": {"soft": 512, "hard": 512}}, machine.open_files, WARNING, "512 files", "limits.conf",
    ),
    "unknown variable": (
        {"environment": {"GOSSAMER_BUCKET_BYTE": "1"}},
        variables.unknown, ERROR, "GOSSAMER_BUCKET_BYTE=1", "did you mean GOSSAMER_BUCKET_BYTES?",
    ),
    "unknown variable of Gloo": (
        {"environment": {"GLOO_IFNAME": "eth0"}}, variables.unknown, WARNING, "GLOO_IFNAME", "GLOO_SOCKET_IFNAME?",
    ),
    "refused value": (
        {"refused_settings": "GOSSAMER_TIMEOUT_S must be ..."}, variables.unknown, ERROR, "must be", "unset it",
    ),
    "two places": (
        {"environment": dict(zip((*variables.PLACES["Horovod"], *variables.PLACES["Open MPI"]), "1202", strict=True))},
        variables.contradictory, ERROR, "Horovod: 1 of 2, Open MPI: 0 of 2", "unset",
    ),
    "two devices": (
        {"environment": {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}},
        variables.contradictory, WARNING, "different devices", "--network-interfaces",
    ),
    "different variable": (
        {"environment": {"GOSSAMER_BUCKET_BYTES": "1"}},
        variables.contradictory, ERROR, "not set on rank 0; 1 on rank 1", "gossamer run -x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_host_is_named_and_there_is_advice(fault) -> None:
    changes, check, status, finding, advice = FAULTS[fault]
    row = one(check(two(**changes)))
    assert (row.status, finding in row.finding, advice in row.advice) == (status, True, True), row
    assert {each.status for each in check(two())} <= {OK}


PUBLIC = ("8.8.8.8", "192.0.0.9", "2001:4860:4860::8888", "::ffff:8.8.8.8")
NOT_PUBLIC = (
    "10.1.2.3", "172.16.0.1", "192.168.0.1", "127.0.0.1", "169.254.1.1", "100.64.0.1", "0.0.0.0", "203.0.113.1",
    "::1", "fe80::1%eth0", "fd00::1", "2001:db8::1", "::ffff:10.0.0.1",
)  # fmt: skip


def test_public_addresses_are_those_that_the_internet_reaches() -> None:
    assert exposure.public_among([*PUBLIC, *NOT_PUBLIC]) == [*PUBLIC]


def test_a_public_address_that_nothing_listens_on_is_told_and_is_no_warning() -> None:
    private = {"listening": [{"what": "store", "address": "127.0.0.1", "port": 1}], "addresses": ["8.8.8.8"]}
    row = one(exposure.exposed(Job([rank(**private)])))
    assert (row.status, row.finding) == (OK, "no store and no Gloo port listens on it: a: 8.8.8.8")
    assert one(exposure.exposed(two())).finding == "no host has one"


def test_a_socket_of_ipv4_alone_is_not_on_a_public_address_of_ipv6() -> None:
    store = {"listening": [{"what": "store", "address": "0.0.0.0", "port": 1}]}
    assert one(exposure.exposed(Job([rank(**store, addresses=["2001:4860::8"])]))).status == OK
    assert one(exposure.exposed(Job([rank(**store, addresses=["8.8.8.8"])]))).status == WARNING


def test_ranks_of_a_host_that_see_the_same_store_give_one_row() -> None:
    ranks = [rank(addresses=["8.8.8.8"]) for _ in range(3)]
    assert len(exposure.exposed(Job(ranks))) == 1


def test_a_loopback_name_is_only_a_warning_on_the_one_host_of_a_run() -> None:
    assert one(network.interface(Job([rank(resolved=["127.0.0.1"])]))).status == WARNING


def test_a_master_at_a_loopback_address_is_an_error_between_hosts_alone() -> None:
    there = {"environment": {"MASTER_ADDR": "127.0.0.1"}}
    assert one(variables.contradictory(Job([rank("a", **there), rank("b", **there)]))).status == ERROR
    assert variables.contradictory(Job([rank(**there), rank(**there)])) == []


def test_more_workers_than_cores_or_gpus_are_told() -> None:
    crowd = [rank(cuda=GPU, cores={"usable": 1, "quota": None, "threads": 1}) for _ in range(2)]
    assert one(software.cuda(Job(crowd))).finding == "a: 1 GPUs for 2 workers"
    assert "2 workers on 1 cores" in one(machine.cores(Job(crowd))).finding


def test_ssh_that_is_missing_matters_on_the_first_host() -> None:
    assert one(variables.ssh(Job([rank(ssh=None)]))).status == WARNING
    assert one(variables.ssh(two(ssh=None))).status == OK


def test_hosts_of_one_name_are_told_apart_by_their_network() -> None:
    same = [rank(host={"name": "vm", "id": f"boot net:{number}"}) for number in (1, 1, 2)]
    assert Job(same).hosts == {"vm (rank 0)": [0, 1], "vm (rank 2)": [2]}


def test_ranks_of_a_host_that_cannot_share_memory_are_named() -> None:
    facts_of = [rank(placement=GOOD["placement"] | {"local_size": 2}) for _ in range(2)]
    assert one(network.sharing(Job(facts_of, shared=[[0, 1]]))).status == OK
    row = one(network.sharing(Job(facts_of, shared=[[0], [1]])))
    assert (row.status, "--ipc host" in row.advice) == (WARNING, True)


def test_whether_a_model_goes_by_hosts_is_said_with_the_reason() -> None:
    def told(job: Job) -> tuple[str, str]:
        row = one(network.levels(job))
        assert row.status == OK
        return row.finding, row.advice

    four = [rank(host) for host in "aabb"]
    by_hosts = "2 hosts x 2 ranks: sums exactly inside a host, codec between hosts"
    assert told(Job(four)) == (by_hosts, "process_group=gs.Flat() for one level")
    with_gpus = [each | {"cuda": GPU} for each in four]
    assert told(Job(with_gpus))[0] == f"{by_hosts}; without a codec NCCL sums in its own way"
    assert told(Job(four, shared=[[0], [1], [2], [3]])) == ("4 hosts x 1 rank: a model sums in one level", "")
    assert told(Job(four[:2], shared=[[0, 1]]))[0] == "1 host x 2 ranks: a model sums in one level"
    assert told(Job(four, shared=[[0, 1, 2], [3]]))[0].startswith(
        "2 hosts of 1 to 3 ranks, 1 of each carry: sums"
    )


def test_the_slow_pair_and_the_wrong_clock_are_found() -> None:
    def pair(a, b, rate=1e8, clock_s=0.0):
        return Pair((a, b), 1e-4, rate, 1e8, clock_s, 1e-4)

    job = Job(
        [rank(host) for host in "abc"], pairs=[pair(0, 1), pair(0, 2, clock_s=-2.0), pair(1, 2, rate=1e7)]
    )
    assert [row.status for row in network.pairs(job)] == [OK, OK, WARNING]
    assert network.pairs(job)[2].finding.startswith("b and c: 100 us, 80 Mbit/s there, 800 Mbit/s back")
    clock = one(network.clocks(job))
    assert (clock.status, clock.finding.startswith("c is -2000.00 ms from a")) == (WARNING, True)


def test_many_pairs_are_summed_up_and_the_slow_one_is_still_shown() -> None:
    ranks = [rank(f"h{number}") for number in range(6)]
    pairs = [Pair((a, b), 1e-4, 1e8, 1e8, 0.0, 0.0) for a in range(6) for b in range(a)]
    pairs[12] = Pair((5, 2), 1e-1, 1e8, 1e8, 0.0, 0.0)
    rows = network.pairs(Job(ranks, pairs=pairs))
    assert len(rows) == 12
    assert "4 more" in rows[-1].finding
    assert [row.finding.split(":")[0] for row in rows if row.status == WARNING] == ["h5 and h2"]


def test_a_probe_and_a_check_that_break_are_error_rows_and_the_others_go_on(monkeypatch) -> None:
    monkeypatch.setitem(facts.PROBES, "ssh", lambda: 1 / 0)
    own = facts.collect(Placement("alone", 0, 1, 0, 1))
    assert own["ssh"] == {"broken": "ZeroDivisionError: division by zero"}

    def broken(job):
        raise KeyError("gone")

    listed = {"ssh": variables.ssh, "broken": broken, "versions": software.versions}
    rows = checks.run(Job([own]), listed)
    assert [row.status for row in rows] == [ERROR, ERROR, OK]
    assert "rank 0 cannot tell its ssh: ZeroDivisionError" in rows[0].finding
    assert "KeyError: 'gone'" in rows[1].finding
    assert list(Job([own | {"host": {"broken": "no"}}] * 2).hosts.values()) == [[0], [1]]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_pair_has_a_turn_and_neighbours_share_no_host(count) -> None:
    order = list(meeting.rounds(range(10, 10 + count)))
    assert sorted(order) == [(a, b) for a in range(10, 10 + count) for b in range(a + 1, 10 + count)]
    at_once = count // 2
    for begin in range(0, len(order), at_once):
        ranks = [each for pair in order[begin : begin + at_once] for each in pair]
        assert len(set(ranks)) == len(ranks)
