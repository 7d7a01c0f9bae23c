"""What each process of a job runs: it calls what pytest's process sends, and tells what became of it. See jobs.py."""

import pickle
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from tests import ROOT
from tests.support.forks import become, leave

SKIPPED = "skipped: "


def outcome(call: bytes) -> str:
    """ "" if it returns, or why it does not, with the local variables, because no one rewrites the assertions here."""
    import pytest

    try:
        function, arguments = pickle.loads(call)
        function(**arguments)
    except pytest.skip.Exception as skipped:
        return f"{SKIPPED}{skipped.msg}"
    except BaseException as error:
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        return "".join(f"{line[:1000]}\n" for text in told.format() for line in text.splitlines())
    return ""


def serve(connection: Connection, environment: Mapping[str, str], output: Path) -> None:
    """The loop of a rank. This module imports torch nowhere above: ``become`` sets the variables that it reads."""
    become(environment, ROOT, output, output)
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            leave(0)
        connection.send(outcome(call))
        sys.stdout.flush()
