# One worker of an elastic run on another host, the near end, over the ssh of launch/ssh.py. The far end is far.py: it
# starts the process, reports how the process has ended, and ends it when this end is gone. Used by command.py.
"""A worker that is reached over ssh."""

import os
import queue
import signal
from collections.abc import Mapping, Sequence

from gossamer.launch import ssh
from gossamer.launch.elastic.process import Program
from gossamer.launch.elastic.slots import Slot
from gossamer.launch.hosts import Host
from gossamer.launch.outcome import Failure

FAR = ssh.AGENT.replace("gossamer.launch.agent", "gossamer.launch.elastic.far")


class RemoteWorker:
    """A worker on another host.

    Args:
        options: the options of ssh.
        exported: the entries of -x, whose variables the worker gets.
    """

    def __init__(
        self,
        program: Program,
        number: int,
        slot: Slot,
        *,
        env: Mapping[str, str],
        options: Sequence[str],
        exported: Sequence[str],
    ) -> None:
        self.number, self.slot = number, slot
        self._events: queue.Queue[ssh.AgentEvent] = queue.Queue()
        self._said: bool | Failure = False
        self._agent = ssh.Agent(Host(slot.host, 1), number, options=options, events=self._events)
        variables = dict(ssh.environment(exported)) | dict(program.env) | dict(env)
        self._agent.send({"environment": variables, "directory": os.getcwd(), "agent": FAR})
        self._agent.send(
            {
                "command": list(program.command),
                "number": number,
                "slot": [slot.host, slot.index],
                "tee": program.tee,
            }
        )

    def ended(self) -> bool | Failure:
        while not self._events.empty():
            event = self._events.get()
            if event.kind == "ready":
                ssh.check_versions(self.slot.host, event.said["versions"])
            elif event.kind == "ended":
                failure = event.said["failure"]
                self._said = True if failure is None else Failure(**failure)
            elif event.kind == "exit":
                return self._said or self._lost(event.said)
        return False

    def end(self) -> None:
        self._agent.end()

    def kill(self) -> None:
        self._agent.process.kill()

    def _lost(self, code: int) -> Failure:
        why = (
            f"{self._agent.command[0]} ended with code {code}: {self._agent.last_words or 'it said nothing'}"
        )
        return Failure(self.number, -signal.SIGHUP, 0.0, why, told=False)
