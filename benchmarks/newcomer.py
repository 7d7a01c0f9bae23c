"""How long the others wait for a newcomer under gs.elastic: one that copies the state before it joins, or then.

Two workers train on, and a third comes. Each is on a host of its own: network namespaces with links of RATE, reached
over ssh. A wait is the longest time between two steps of a worker since the newcomer has come, less that of an
undisturbed period. The peer is a newcomer whose script enters the group at once, and copies the state then. Needs root
and openssh-server; without them all are on this host, where a copy takes no time worth a figure.
"""

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from harness import arguments, report_against
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer as gs
from gossamer import netlab
from gossamer.bench.measuring import note

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from tests.launch import sshd

RATE = "100mbit"
WIDTH = 512
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)
ALGORITHMS = {
    "gradients": lambda period: gs.GradientAllReduce(),
    "DiLoCo in 4 bits": lambda period: gs.LocalSGD(period, OUTER, codec=gs.ErrorFeedback(gs.Int4())),
}
PATIENCE_S = 240


def train(folder: str, way: str, layers: int, period: int, sleep_s: float, *, early: bool) -> None:
    """Trains until SIGTERM, and writes when each step has ended, and in how large a group."""
    worker = os.environ["GOSSAMER_ELASTIC_WORKER"]
    gs.init("gloo")
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    model = gs.DataParallel(net, optimizer, algorithm=ALGORITHMS[way](period))
    if early:
        model.report()  # needs the group
    data = TensorDataset(torch.randn(1 << 14, WIDTH))
    run = gs.elastic(DataLoader(data, 1, sampler=gs.ElasticSampler(data)), model, optimizer)
    with open(Path(folder) / worker, "a", buffering=1) as steps:
        for _ in run.epochs(10**6):
            for (batch,) in run:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                time.sleep(sleep_s)
                steps.write(f"{time.time()} {model.links.control.size}\n")


@contextlib.contextmanager
def run_on(hosts: netlab.Hosts | None, folder: Path, job: dict) -> Iterator[subprocess.Popen]:
    """Runs train() elastically on the hosts that the file `hosts` of the folder names; None: on this one."""
    flags = ["--min-np", "1", "--host-discovery-script", f"cat {folder}/hosts"]
    worker = [__file__, "--worker", json.dumps(job)]
    command = [sys.executable, "-m", "gossamer.launch.cli", "run", *flags]
    with contextlib.ExitStack() as stack:
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
        if hosts is not None:
            ssh = stack.enter_context(sshd.Reachable(hosts, folder / "ssh"))
            command = [*hosts.prefix(0), *command, "-p", str(sshd.PORT), "-i", ssh.key]
            environment |= ssh.env
        log = stack.enter_context(open(folder / "log", "w"))
        process = subprocess.Popen([*command, *worker], stdout=log, stderr=log, env=environment)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def lines(folder: Path, worker: int) -> list[tuple[float, int]]:
    """When each step of a worker has ended, and the size of its group."""
    file = folder / str(worker)
    if not file.exists():
        return []
    return [(float(at), int(size)) for at, size in (line.split() for line in file.read_text().splitlines())]


def wait_of(hosts: netlab.Hosts | None, job: dict, period: int) -> float:
    """Seconds that a worker waited for the newcomer, the longer one of two."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = [hosts.address(host) for host in range(3)] if hosts else ["localhost"] * 3
        listing = [f"{place}:1" for place in places] if hosts else ["localhost:2", "", "localhost:3"]
        (folder / "hosts").write_text("\n".join(listing[:2]))
        with run_on(hosts, folder, job | {"folder": name}) as process:

            def until(enough: int, size: int) -> None:
                due = time.time() + PATIENCE_S
                while sum(found == size for _, found in lines(folder, 0)) < enough:
                    if process.poll() is not None or time.time() > due:
                        raise RuntimeError(
                            f"no {enough} steps of {size} workers:\n{(folder / 'log').read_text()[-3000:]}"
                        )
                    time.sleep(0.05)

            until(4 * period + 2, 2)
            came = time.time()
            (folder / "hosts").write_text("\n".join(listing if hosts else listing[2:]))
            until(2 * period + 2, 3)
        waits = []
        for worker in (0, 1):
            ends = [at for at, _ in lines(folder, worker)]
            gaps = [(after, after - before) for before, after in itertools.pairwise(ends)]
            quiet = [gap for at, gap in gaps if at < came][-3 * period :]
            usual = median(max(quiet[at : at + period]) for at in range(0, len(quiet), period))
            waits.append(max(gap for at, gap in gaps if at >= came) - usual)
        return max(0.0, *waits)


def main() -> int:
    options = arguments(__doc__)
    if options.worker:
        torch.set_num_threads(1)
        train(**json.loads(options.worker))
        return 0
    if why := sshd.missing():
        note(f"all workers on this host: {why}")
    far = not why and not options.quick
    layers, turns = (2, 1) if options.quick else (8, 3)
    with netlab.Hosts(3, rate=RATE) if far else contextlib.nullcontext() as hosts:
        for way in list(ALGORITHMS)[: 1 if options.quick else None]:
            period, sleep_s = (1, 0.02 if options.quick else 1.2) if way == "gradients" else (20, 0.3)
            job = {"way": way, "layers": layers, "period": period, "sleep_s": sleep_s}
            before, then = [], []
            for _ in range(turns):
                before.append(wait_of(hosts, job | {"early": False}, period))
                then.append(wait_of(hosts, job | {"early": True}, period))
            where = f"3 hosts, {RATE}" if far else "one host"
            report_against(
                f"the others' wait for a newcomer, {way}, AdamW, {layers * WIDTH**2:,} parameters, {where}",
                before,
                "s",
                ("one that copies while they wait", then),
                [ours / max(theirs, 1e-3) for ours, theirs in zip(before, then, strict=True)],
                at_most=0.5,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
