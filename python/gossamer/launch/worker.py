# What `gossamer run` starts in each worker. It sets Horovod's variables, runs the user's script or module as __main__
# and, if that raises, leaves the traceback in the error file of torch's agent. It runs as a file and is not imported,
# so that the user's script is the first to import torch and gossamer, and their errors are reported like the script's
# own.
"""The worker's side of ``gossamer run``: ``worker.py FLAGS SCRIPT ARGS...``; here.py writes the flags as JSON."""

import faulthandler
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

ALIAS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "alias")
NOT_THE_USERS = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    faulthandler.enable()  # a crash in native code prints where Python was
    flags, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    if "GROUP_WORLD_SIZE" in os.environ:
        os.environ.update(_horovod_variables(flags, os.environ))
    if flags["attempt"]:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(flags["attempt"])
    target, as_module = arguments[0], flags["module"]
    if flags["no_python"]:
        _exec(target, arguments)
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = "" if as_module else os.path.dirname(os.path.abspath(target))
    for folder in filter(flags.get, ("as_horovod", "as_bagua")):
        # multiprocessing gives sys.path to the processes that it spawns, and these import the script too.
        sys.path.insert(0, os.path.join(ALIAS, folder))
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except KeyboardInterrupt:
        # End by the signal, as a program without a handler does. A traceback would say nothing.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as error:
        if error.code not in (None, 0):
            _write_error_file(error, "")
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__)))
        _write_error_file(error, text)
        print(text, file=sys.stderr, end="", flush=True)
        sys.exit(1)


def _horovod_variables(flags: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Returns Horovod's variables. CROSS_*: this host among those that have a worker with this local rank."""
    local_rank, host, count = (int(env[name]) for name in ("LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"))
    size, local_size = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
    found = {"RANK": env["RANK"], "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    found["HOSTNAME"] = flags["host_name"] or socket.gethostname()
    slots = flags["slots"]
    if not slots and size == count * local_size:
        slots = [local_size] * count
    # Without slots, unequal numbers of workers a host are unknown: the user has started an agent on each host.
    if slots:
        with_this = [index for index, workers in enumerate(slots) if workers > local_rank]
        found |= {"CROSS_RANK": with_this.index(host), "CROSS_SIZE": len(with_this)}
    return {f"HOROVOD_{name}": str(value) for name, value in found.items()}


def _exec(program: str, arguments: list[str]) -> NoReturn:
    try:
        os.execvp(program, arguments)
    except OSError as error:
        _write_error_file(error, "")
        print(f"{program}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in NOT_THE_USERS:
        trace = trace.tb_next
    return trace


def _write_error_file(error: BaseException, text: str) -> None:
    """Writes torchelastic's format, and the time in nanoseconds, because whole seconds cannot order failures.

    The file comes into being whole: the agent reads it, also if it has ended this process meanwhile.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now_ns = time.time_ns()
    extra = {"py_callstack": text, "timestamp": str(now_ns // 10**9), "time_ns": now_ns}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with open(path + ".part", "w") as file:
        json.dump({"message": message}, file)
    os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
