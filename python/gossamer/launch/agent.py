# The agent of one host in `gossamer run -H`; ssh.py has the near end. It runs torch's agent for the workers of this
# host, and reports when it is ready and how it has ended. When its input ends, it ends its workers: after Ctrl-C,
# when another host has failed, and when the machine that started it, or the network between them, is gone.
"""The agent of one host."""

import argparse
import contextlib
import glob
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, NoReturn

from gossamer.launch import addresses, here, rendezvous
from gossamer.launch.ssh import MARK, pack, unpack, versions

LEAVE_S = 45  # torch's agent gives workers 30 s to end


def main() -> None:
    control = private_input()
    signal.signal(signal.SIGTERM, leave)
    job = read(control)
    say("ready", **_about(job["interfaces"]))
    args = argparse.Namespace(**job["args"] | read(control))
    rendezvous.choose(args, address=args.master_addr, port=args.master_port, timeout_s=args.start_timeout)
    folder = here.scratch()
    with folder, here.scratch() as payload:
        args.log_dir = args.log_dir or folder.name
        if args.payload is not None:
            args.payload = args.training_script_args[0] = payload
            unpack(job["files"], args.payload)
        threading.Thread(target=watch, args=(control, folder), daemon=True).start()
        addresses.choose_device(args.master_addr)
        ended = here.run(args)
        files = pack(args.payload, "[er]*")  # errors and results
    say("ended", files=files, **ended.to_json())


def private_input() -> IO[bytes]:
    """Returns this process's input, which the workers then do not inherit."""
    control = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return control


def read(control: IO[bytes]) -> dict[str, Any]:
    """Returns the next message of the near end, and ends this process if there is none."""
    message: dict[str, Any] = json.loads(control.readline() or sys.exit(1))
    return message


def leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def watch(control: IO[bytes], folder: "tempfile.TemporaryDirectory[str]") -> None:
    """Ends this process and its workers once the input has ended."""
    while os.read(control.fileno(), 1024):  # a file object would block the interpreter's end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    # torch's agent may wait in native code for a host that is gone. Without workers that wait is useless.
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
    return not lists  # the kernel does not list children


def say(kind: str, **values: Any) -> None:
    print(f"{MARK}{json.dumps({'kind': kind, **values})}", flush=True)


def _about(interfaces: Sequence[str]) -> dict[str, Any]:
    """Returns what fleet.py must know about this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    client, server = addresses.seen_by_ssh()
    known = [name for _, name in socket.if_nameindex()]
    return {
        "versions": versions(),
        "port": port,
        "client": client,
        "server": server,
        "address": next((own for name in interfaces if (own := addresses.of_device(name))), None),
        "missing": [name for name in interfaces if name not in known],
    }
