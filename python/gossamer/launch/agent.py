# The far end of ssh.py, one process a host of `gossamer run -H`: runs torch's agent for the workers of this host, says
# when it is ready and how it ended, and ends its workers when its input ends: on Ctrl-C, when another host has failed,
# and when whoever started it, or the network between, is gone.
"""The agent of one host."""

import argparse
import contextlib
import fcntl
import glob
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, NoReturn

import torch

from gossamer import __version__
from gossamer.launch import here
from gossamer.launch.ssh import MARK, pack, unpack

LEAVE_S = 45  # torch's agent gives workers 30 s to end
SIOCGIFADDR = 0x8915


def main() -> None:
    control = os.fdopen(os.dup(0), "rb")  # not inherited by the workers, who read nothing
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    signal.signal(signal.SIGTERM, leave)
    job = json.loads(control.readline() or sys.exit(1))
    say("ready", **_about(job["interfaces"]))
    go = json.loads(control.readline() or sys.exit(1))
    args = argparse.Namespace(**job["args"] | go)
    with contextlib.ExitStack() as stack:
        folder = scratch()
        stack.enter_context(folder)
        args.log_dir = args.log_dir or folder.name
        if args.payload is not None:
            args.payload = args.training_script_args[0] = stack.enter_context(scratch())
            unpack(job["files"], args.payload)
        threading.Thread(target=watch, args=(control, folder), daemon=True).start()
        choose_device(args.master_addr)
        ended = here.run(args)
        files = pack(args.payload, "[er]*")  # errors and results
    say("ended", files=files, **ended.to_json())


def scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="gossamer-run-", ignore_cleanup_errors=True)


def leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def watch(control: IO[bytes], folder: tempfile.TemporaryDirectory) -> None:
    """Ends everything once the input has ended."""
    while os.read(control.fileno(), 1024):  # no reader that the interpreter would have to wait for at its end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    # torch's agent may wait inside native code for another host that is gone; without workers that serves nobody.
    idle = 0
    for _ in range(LEAVE_S * 2):
        time.sleep(0.5)
        idle = 0 if _has_children() else idle + 1
        if idle == 3:
            break
    folder.cleanup()
    os._exit(128 + signal.SIGTERM)


def _has_children() -> bool:
    lists = glob.glob("/proc/self/task/*/children")
    for path in lists:
        with contextlib.suppress(OSError), open(path) as file:
            if file.read().strip():
                return True
    return not lists  # a kernel that does not tell


def say(kind: str, **values: Any) -> None:
    print(f"{MARK}{json.dumps({'kind': kind, **values})}", flush=True)


def _about(interfaces: Sequence[str]) -> dict[str, Any]:
    """What fleet.py needs to know of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    # "client-address port server-address port", by which the two machines see each other.
    seen = os.environ.get("SSH_CONNECTION", "").split()
    addresses = [address for name in interfaces if (address := _address(name))]
    return {
        "versions": {"gossamer": __version__, "torch": torch.__version__},
        "port": port,
        "client": seen[0] if len(seen) == 4 else None,
        "server": seen[2] if len(seen) == 4 else None,
        "address": addresses[0] if addresses else None,
        "missing": [name for name in interfaces if name not in (known for _, known in socket.if_nameindex())],
    }


def choose_device(master: str) -> None:
    """Gloo looks for the address of this host's name; where that is a loopback address, no other host reaches it."""
    if "GLOO_SOCKET_IFNAME" in os.environ or _named_address_serves():
        return
    own = _own_address(master)
    for _, name in socket.if_nameindex():
        if own is not None and not own.startswith("127.") and _address(name) == own:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _named_address_serves() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return not str(found[0][4][0]).startswith(("127.", "::1"))


def _own_address(peer: str) -> str | None:
    """This host's address on the way to a peer. Nothing is sent."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address(device: str) -> str | None:
    """IPv4 address of a network device."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
        except OSError:
            return None
        return socket.inet_ntoa(answer[20:24])
