# The scripts of examples/kubernetes, with network namespaces as pods. No cluster is needed, and none has been tried.

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer import netlab
from tests import ROOT
from tests.launch import sshd
from tests.launch.test_plain_elastic import EXACT, LOOP, ends, lines_of, loop, wait_for, wait_until

EXAMPLE = ROOT / "examples" / "kubernetes"
unavailable = sshd.missing()


class Pods:
    """As many pods as hosts, under the names that job.yaml gives them."""

    def __init__(self, hosts: netlab.Hosts, folder: Path) -> None:
        self.hosts, self.folder, self.processes = hosts, folder, []
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id")]
        subprocess.run(key, check=True)
        self.names = [f"{hosts.address(pod)} train-{pod}.train\n" for pod in range(hosts.count)]

    def __enter__(self) -> "Pods":
        for pod in range(self.hosts.count):  # `ip netns exec` mounts it as /etc/hosts
            place = Path("/etc/netns") / self.hosts.namespace(pod)
            place.mkdir(parents=True)
            (place / "hosts").write_text("127.0.0.1 localhost\n" + "".join(self.names))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for pod in range(self.hosts.count):
            shutil.rmtree(Path("/etc/netns") / self.hosts.namespace(pod))
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()

    def start(self, pod: int, *command: str) -> subprocess.Popen:
        own = {"JOB_COMPLETION_INDEX": str(pod), "KEYS": str(self.folder), "PORT": str(sshd.PORT)}
        own |= {"PODS": str(self.hosts.count), "WORKERS_EACH": "1", "MIN_WORKERS": "1"}
        own["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = [*self.hosts.prefix(pod), "/bin/sh", *command]
        self.processes.append(subprocess.Popen(words, env=os.environ | own, **streams))
        return self.processes[-1]


@pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")
def test_pods_train_lose_a_worker_and_give_one_up_that_is_told_to_leave(tmp_path, tmp_path_factory) -> None:
    plan = {"kill": {"0": [5, "backward"]}, "sleep_s": 0.02}
    script = [str(LOOP), str(tmp_path), str(10**6), json.dumps(plan)]
    with netlab.Hosts(3) as hosts, Pods(hosts, tmp_path_factory.mktemp("keys")) as pods:
        for pod in (1, 2):
            pods.start(pod, str(EXAMPLE / "pod.sh"), "unused")
        driver = pods.start(0, str(EXAMPLE / "pod.sh"), *script)
        wait_for(tmp_path, lambda line: line.get("size") == 2 and line.get("step", 0) > 20)
        assert pods.start(2, str(EXAMPLE / "leave.sh")).wait(60) == 0
        steps = lines_of(tmp_path, 1, "step")
        wait_until(lambda: lines_of(tmp_path, 1, "step") > steps + 5)
        driver.send_signal(signal.SIGTERM)
        out, _ = driver.communicate(timeout=90)
    assert driver.returncode == 0, out
    assert "worker 0 (slot 0 of train-0.train) was killed by signal 9 (SIGKILL)" in out
    assert re.search(r"worker \d \(slot 0 of train-2.train\) has gone, as it was told", out), out
    assert loop.check(tmp_path)["worst"] < EXACT
    assert 1 in ends(tmp_path)


def test_the_job_and_its_scripts_say_the_same() -> None:
    job = (EXAMPLE / "job.yaml").read_text()
    pods = {int(number) for number in re.findall(r"(?:completions|parallelism): (\d+)", job)}
    assert pods == {int(re.search(r'PODS, value: "(\d+)"', job)[1])}
    assert "subdomain: train" in job
    assert "train-$pod.train" in (EXAMPLE / "hosts.sh").read_text()
    grace = int(re.search(r"--grace (\d+)", (EXAMPLE / "pod.sh").read_text())[1])
    assert grace < int(re.search(r"terminationGracePeriodSeconds: (\d+)", job)[1])
    used = set(re.findall(r"/scripts/(\w+\.sh)", job)) | {"hosts.sh"}
    listed = re.search(r"files: \[(.*)\]", (EXAMPLE / "kustomization.yaml").read_text())[1].split(", ")
    assert used == set(listed) == {path.name for path in EXAMPLE.glob("*.sh")}
