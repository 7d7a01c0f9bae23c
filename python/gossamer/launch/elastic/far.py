# The far end of remote.py, one process for each worker. It starts the worker on its host and reports how the worker has
# ended. It ends the worker when its own input ends: the driver has closed it, or the driver or the network is gone.
"""The host's side of a worker of an elastic run that was started over ssh."""

import dataclasses
import os
import threading
import time

from torch.distributed.elastic.multiprocessing.api import SignalException

from gossamer.config import ELASTIC_VARIABLES
from gossamer.launch import addresses, agent
from gossamer.launch.elastic.process import LocalWorker, Program
from gossamer.launch.elastic.slots import Slot
from gossamer.launch.here import scratch
from gossamer.launch.outcome import Failure
from gossamer.launch.output import whole_lines
from gossamer.launch.ssh import versions
from gossamer.membership import LOCAL

STEP_S = 0.05
LEAVE_S = 30.0  # for the worker to end when it is told to


def main() -> None:
    control = agent.private_input()
    job = agent.read(control)
    agent.say("ready", versions=versions())
    host, _, port = os.environ[ELASTIC_VARIABLES[0]].rpartition(":")
    if host == LOCAL:  # the board listens on every address
        host = addresses.seen_by_ssh()[0] or host  # the driver as this host sees it
    os.environ[ELASTIC_VARIABLES[0]] = f"{host}:{port}"
    addresses.choose_device(host)
    folder = scratch()
    with folder, whole_lines():
        program = Program(job["command"], folder.name, tee=job["tee"])
        worker = LocalWorker(program, job["number"], Slot(*job["slot"]), env={})
        threading.Thread(target=agent.watch, args=(control, folder), daemon=True).start()
        outcome = _await(worker)
    agent.say("ended", failure=dataclasses.asdict(outcome) if isinstance(outcome, Failure) else None)


def _await(worker: LocalWorker) -> bool | Failure:
    try:
        while (outcome := worker.ended()) is False:
            time.sleep(STEP_S)
    except SignalException:  # agent.watch() has sent the signal
        worker.end()
        deadline = time.monotonic() + LEAVE_S
        while (outcome := worker.ended()) is False and time.monotonic() < deadline:
            time.sleep(STEP_S)
        if outcome is False:
            worker.kill()
    return outcome
