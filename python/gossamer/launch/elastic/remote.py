# One worker of an elastic run on another host, the near end, over the ssh of launch/ssh.py. The far end is far.py: it
# starts the process, reports how the process has ended, and ends it when this end is gone. Used by command.py.
"""A worker that is reached over ssh."""

import argparse
import queue
import signal
from collections.abc import Mapping

from gossamer.launch import ssh
from gossamer.launch.elastic.process import Program
from gossamer.launch.elastic.slots import Slot
from gossamer.launch.hosts import Host
from gossamer.launch.outcome import Failure


class RemoteWorker:
    """A worker on another host. ``args`` are the flags of `gossamer run`."""

    def __init__(
        self, program: Program, number: int, slot: Slot, *, env: Mapping[str, str], args: argparse.Namespace
    ) -> None:
        self.number: int = number
        self.slot = slot
        self._events: queue.Queue[ssh.AgentEvent] = queue.Queue()
        self._said: bool | Failure = False
        variables, host = ssh.environment(args) | dict(program.env) | dict(env), Host(slot.host, 1)
        self._agent = ssh.Agent(host, number, "elastic.far", variables, args=args, events=self._events)
        job = {"command": list(program.command), "number": number, "tee": program.tee}
        self._agent.send(job | {"slot": [slot.host, slot.index]})

    def ended(self) -> bool | Failure:
        while not self._events.empty():
            event = self._events.get()
            if event.kind == "ready":
                ssh.check_versions(self.slot.host, event.said["versions"])
            elif event.kind == "ended":
                failure = event.said["failure"]
                self._said = True if failure is None else Failure(**failure)
            elif event.kind == "exit":
                why = self._agent.ended_with(event.said)
                return self._said or Failure(self.number, -signal.SIGHUP, 0.0, why, told=False)
        return False

    def end(self) -> None:
        self._agent.end()

    def kill(self) -> None:
        self._agent.process.kill()

    give_up = kill  # the far end kills the worker when its ssh has ended
