"""What another user of a host can open of a job: no memory, no socket, no file that Gossamer makes. Root alone can
become another user, so these tests need root."""

import contextlib
import glob
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user"),
]

# Every rank has its regions, and prints; then it waits until the test has looked.
HOLD = """
import os, sys, time, torch, gossamer as gs
gs.init()
gs.all_reduce(torch.ones(1000))
model = gs.DataParallel(torch.nn.Linear(8, 8), process_group=gs.Flat())
model(torch.ones(1, 8)).sum().backward()
print("secret of rank", gs.rank(), flush=True)
with open(f"pid{gs.rank()}.part", "w") as file:
    file.write(f"{os.getpid()} {os.environ['TORCHELASTIC_ERROR_FILE']}")
os.rename(f"pid{gs.rank()}.part", f"pid{gs.rank()}")
while not os.path.exists("looked"):
    time.sleep(0.05)
model.close()
gs.shutdown()
"""


def as_nobody(look: Callable[[], Any]) -> Any:
    """Returns look(), called by another user in a process of its own. The value must be one that JSON can hold."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, json.dumps(look()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def opened(paths: list[str]) -> list[str]:
    """Returns the paths that this user can read or write, and the folders that it can list."""
    found = []
    for path in paths:
        for flags in (os.O_RDONLY, os.O_WRONLY):
            with contextlib.suppress(OSError):
                os.close(os.open(path, flags | os.O_NONBLOCK))
                found.append(path)
    return sorted({*found})


def reached(names: list[str]) -> list[str]:
    """Returns the abstract unix sockets that take a connection of this user."""
    found = []
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own, contextlib.suppress(OSError):
            own.connect("\0" + name.removeprefix("@"))
            found.append(name)
    return found


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter and list, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="open", dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("flags", [["-np", "2"], ["--min-np", "2"]], ids=["usual", "elastic"])
def test_another_user_can_open_nothing_of_a_running_job(fork, open_folder, tmp_path, flags) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    logs = open_folder / "logs"
    if flags == ["-np", "2"]:
        flags = [*flags, "--output-filename", str(logs)]
    argv = ["-m", "gossamer.launch.cli", "run", *flags, "hold.py"]
    mask = os.umask(0o022)
    try:
        job = fork(argv, env={"TMPDIR": str(open_folder)})
    finally:
        os.umask(mask)
    pids = [tmp_path / "pid0", tmp_path / "pid1"]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in pids):
        assert job.process.poll() is None, job.finish()
        assert time.monotonic() < deadline
        time.sleep(0.05)

    told = [path.read_text().split() for path in pids]
    of_processes = [
        path
        for process, _ in told
        for kind in ("fd/*", "map_files/*", "mem", "environ", "maps", "fd", "map_files")
        for path in glob.glob(f"/proc/{process}/{kind}")
    ]
    files = everything_below(open_folder)
    # Those of the job alone: groups of other tests may be about to form.
    held = set()
    for process, _ in told:
        for path in glob.glob(f"/proc/{process}/fd/*"):
            with contextlib.suppress(FileNotFoundError):
                held.add(os.readlink(path))
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table if "@gossamer-" in line]
    sockets = [row[-1] for row in rows if f"socket:[{row[6]}]" in held]
    # The control: root opens all of it, and another user what is meant for all.
    assert all(path.startswith(f"{open_folder}/gossamer-run-") for _, path in told), told
    assert any("gossamer-run-" in path for path in opened(files)), files
    assert any(path.endswith("/mem") for path in opened(of_processes))
    open_file = open_folder / "open"
    open_file.write_text("for all")
    open_file.chmod(0o644)
    assert as_nobody(lambda: opened([str(open_file)])) == [str(open_file)]

    memory = [line for process, _ in told for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    assert as_nobody(lambda: opened(files)) == []
    assert as_nobody(lambda: opened(of_processes)) == []
    assert as_nobody(lambda: reached(sockets)) == []
    assert any("/memfd:gossamer" in line for line in memory)
    assert not any("/dev/shm/" in line for line in memory)
    (tmp_path / "looked").touch()
    code, out, err = job.finish(60)
    assert code == 0, out + err
    if logs.exists():
        assert "secret of rank 1" in (logs / "rank.1" / "stdout").read_text()
        written = [str(logs), *everything_below(logs)]
        assert as_nobody(lambda: opened(written)) == []
        assert stat.S_IMODE(logs.stat().st_mode) == 0o700
    open_file.unlink()
    assert [path for path in everything_below(open_folder) if not path.startswith(str(logs))] == []
