# `gossamer run -H`: starts one agent on each host, and ends them together. ssh.py reaches the hosts, agent.py runs
# there. Ranks are numbered in the order of the hosts. run.py calls it.
"""Running workers on several hosts."""

import argparse
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from gossamer.errors import CommError, ConfigError
from gossamer.launch import hosts as host_lists
from gossamer.launch import ssh
from gossamer.launch.hosts import Host
from gossamer.launch.outcome import Outcome, describe
from gossamer.launch.output import splitting

GRACE_S = 1.0  # how long to wait after a failure for the report of its cause
LEAVE_S = 50.0  # how long a host may take to end its workers


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


def run(args: argparse.Namespace, hosts: Sequence[Host]) -> Outcome:
    """Runs the workers on the hosts, and again after a failure while --max-restarts allows it.

    Raises:
        ConfigError: a host has other versions, or lacks a network device.
        CommError: a host is not reached in time, or is lost.
    """
    size = sum(host.slots for host in hosts)
    with splitting(args, size), _signals():
        for attempt in range(args.max_restarts + 1):
            fleet = _Fleet(args, hosts, attempt=attempt)
            try:
                outcome = fleet.run()
            except _Stopped as stop:
                return Outcome(stopped_by=stop.number)
            finally:
                fleet.end()
            if not outcome.failures:
                break
            if attempt < args.max_restarts:
                times = f"{attempt + 1} of {args.max_restarts} times"
                what = describe(outcome.failures)
                print(f"gossamer run: {what}; all workers start again ({times})", file=sys.stderr)
    return outcome


class _Fleet:
    """The agents of one attempt."""

    def __init__(self, args: argparse.Namespace, hosts: Sequence[Host], *, attempt: int) -> None:
        self.args, self.hosts, self.attempt = args, hosts, attempt
        self.events: queue.Queue[ssh.AgentEvent] = queue.Queue()
        self.agents: list[ssh.Agent] = []
        self.start_timeout = ssh.start_timeout()

    def run(self) -> Outcome:
        names, variables = host_lists.interfaces(self.args), ssh.environment(self.args)
        files = ssh.pack(self.args.payload, "call")
        deadline = time.monotonic() + self.start_timeout
        for index, host in enumerate(self.hosts):
            try:
                agent = ssh.Agent(host, index, "agent", variables, args=self.args, events=self.events)
            except FileNotFoundError as error:
                what = f"host {host.name}: needs the program {error.filename}; install it"
                raise ConfigError(what) from error
            self.agents.append(agent)
            agent.send({"args": self._settings(index), "interfaces": names, "files": files})
            self._tell(index)
        self._go(self._await_ready(deadline))
        return self._await_end()

    def end(self) -> None:
        """Ends all agents and waits for them. A second signal kills them."""
        try:
            for agent in self.agents:
                agent.end()
            deadline = time.monotonic() + LEAVE_S
            while any(agent.process.poll() is None for agent in self.agents) and time.monotonic() < deadline:
                time.sleep(0.05)
        except _Stopped:
            pass  # a second signal: at once
        finally:
            for agent in self.agents:
                if agent.process.poll() is None:
                    agent.process.kill()
            self.agents.clear()

    def _settings(self, index: int) -> dict[str, Any]:
        """The arguments of the run, for the agent of one host."""
        plain = {name: value for name, value in vars(self.args).items() if _is_plain(value)}
        host = self.hosts[index]
        return plain | {
            "nnodes": str(len(self.hosts)),
            "node_rank": index,
            "nproc_per_node": str(host.slots),
            "slots": [each.slots for each in self.hosts],
            "host_name": host.name,
            "attempt": self.attempt,
            "output_filename": None,  # splitting() here does both for all hosts
            "prefix_output_with_timestamp": False,
            "max_restarts": 0,  # run() does that, because a new attempt needs new agents
            "start_timeout": self.start_timeout,
            "rdzv_id": uuid.uuid5(uuid.NAMESPACE_OID, f"{os.getpid()} {id(self)}").hex,
        }

    def _tell(self, index: int) -> None:
        if self.args.verbose:
            first, host = sum(host.slots for host in self.hosts[:index]), self.hosts[index]
            ranks = f"{first}-{first + host.slots - 1}" if host.slots > 1 else str(first)
            how = " ".join(self.agents[index].reached_by) or "here"
            print(f"gossamer run: host {host.name}: rank {ranks} ({how})", file=sys.stderr)

    def _await_ready(self, deadline: float) -> list[dict[str, Any]]:
        ready: list[dict[str, Any]] = [{} for _ in self.agents]
        while not all(ready):
            try:
                event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = ", ".join(
                    agent.host.name for agent, said in zip(self.agents, ready, strict=True) if not said
                )
                raise CommError(
                    f"host {late}: not ready after {self.start_timeout} s; see whether ssh reaches it, or set a "
                    "longer --start-timeout"
                ) from None
            host = self.hosts[event.host].name
            if event.kind == "ready":
                ready[event.host] = event.said
                ssh.check_versions(host, event.said["versions"])
                if missing := event.said["missing"]:
                    raise ConfigError(f"host {host}: has no network device {', '.join(missing)}")
            elif event.kind == "exit":
                how = self.agents[event.host].ended_with(event.said, " before the workers were started")
                raise CommError(f"host {host}: {how}")
        return ready

    def _go(self, ready: Sequence[dict[str, Any]]) -> None:
        """Tells all agents where the first host is."""
        first, address = ready[0], self.args.master_addr
        if address == "127.0.0.1":  # the default of torchrun
            as_seen = next((said["client"] for said in ready if said["client"]), "127.0.0.1")
            own = as_seen if self.hosts[0].is_local() else self.hosts[0].address
            address = first["address"] or first["server"] or own
        for agent in self.agents:
            agent.send({"master_addr": address, "master_port": self.args.master_port or first["port"]})

    def _await_end(self) -> Outcome:
        """Waits until all hosts have ended, or until shortly after the first failure."""
        outcome, said = Outcome(), set()
        left, lost = set(range(len(self.agents))), ""
        deadline: float | None = None
        while left:
            try:
                wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                event = self.events.get(timeout=wait_s)
            except queue.Empty:
                break
            agent, ended_badly = self.agents[event.host], False
            if event.kind == "broken":
                raise _Stopped(signal.SIGPIPE)
            if event.kind == "ended":
                said.add(event.host)
                ssh.unpack(event.said["files"], self.args.payload)
                ended = Outcome.from_json(event.said)
                outcome.failures += ended.failures
                ended_badly = bool(ended.failures or ended.stopped_by)
                if ended.stopped_by and not ended.failures:
                    lost = (
                        lost or f"host {agent.host.name}: its agent was stopped by signal {ended.stopped_by}"
                    )
            elif event.kind == "exit":
                left.discard(event.host)
                if event.host not in said:
                    ended_badly = True
                    lost = lost or f"host {agent.host.name} is lost: {agent.ended_with(event.said)}"
            if ended_badly and deadline is None:
                deadline = time.monotonic() + GRACE_S
        if lost and outcome.failures:
            print(f"gossamer run: {lost}", file=sys.stderr)
        elif lost:
            raise CommError(lost)
        return outcome


@contextmanager
def _signals() -> Iterator[None]:
    """Lets SIGINT, SIGTERM and SIGHUP stop the run, so that its workers end on every host."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise _Stopped(number)

    kept = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, list))
