"""What each process of a job runs: it calls what pytest's process sends, and tells what became of it. See jobs.py."""

import ctypes
import faulthandler
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import pytest
import torch

from tests.support.jobs import SKIPPED

PR_SET_PDEATHSIG = 1


def outcome(call: bytes) -> str:
    """ "" if it returns, or why it does not, with the local variables, because no one rewrites the assertions here."""
    try:
        function, arguments = pickle.loads(call)
        function(**arguments)
    except pytest.skip.Exception as skipped:
        return f"{SKIPPED}{skipped.msg}"
    except BaseException as error:
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        return "".join(f"{line[:1000]}\n" for text in told.format() for line in text.splitlines())
    return ""


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        connection.send(outcome(call))
        sys.stdout.flush()


main()
