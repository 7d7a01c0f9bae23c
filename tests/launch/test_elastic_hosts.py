"""An elastic run over hosts that are network namespaces, each with its own sshd (tests/launch/sshd.py)."""

import pytest

from gossamer import netlab
from tests.launch import elastic_job, sshd
from tests.launch.test_elastic import EXACT, begin, ends

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
