# What `gossamer run` starts in each worker: runs the user's script or module as __main__ and, if it
# raises, leaves the traceback in the agent's error file. Run as a file, not imported: so that the script
# is the first to import torch and gossamer, and their errors are reported like its own.
"""Worker side of ``gossamer run``: ``worker.py SCRIPT ARGS...`` or ``worker.py -m MODULE ARGS...``."""

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from types import TracebackType

NOT_THE_USERS = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    faulthandler.enable()  # a crash in native code prints where Python was
    arguments = sys.argv[1:]
    as_module = arguments[0] == "-m"
    if as_module:
        del arguments[0]
    target = arguments[0]
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = "" if as_module else os.path.dirname(os.path.abspath(target))
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except KeyboardInterrupt:
        # Die of the signal, as a program does that leaves it alone; a traceback here tells nothing.
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


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in NOT_THE_USERS:
        trace = trace.tb_next
    return trace


def _write_error_file(error: BaseException, text: str) -> None:
    """torchelastic's format, with the time in nanoseconds too: its own seconds cannot order a group."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now_ns = time.time_ns()
    extra = {"py_callstack": text, "timestamp": str(now_ns // 10**9), "time_ns": now_ns}
    with open(path, "w") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)


if __name__ == "__main__":
    main()
