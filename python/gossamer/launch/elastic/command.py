# The flags of an elastic `gossamer run`, and what they mean together. driver.py decides while the workers run. run.py
# calls it if one of the flags is given.
"""``gossamer run --min-np M --max-np N``."""

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException

from gossamer.errors import ConfigError
from gossamer.launch import addresses, here
from gossamer.launch import hosts as host_lists
from gossamer.launch.elastic.board import Board
from gossamer.launch.elastic.driver import PATIENCE_S, Driver, Limits
from gossamer.launch.elastic.process import LocalWorker, Program, Worker
from gossamer.launch.elastic.remote import RemoteWorker
from gossamer.launch.elastic.slots import Discovery, Slot, Slots
from gossamer.launch.hosts import Host, refuse
from gossamer.launch.outcome import Outcome
from gossamer.launch.output import whole_lines
from gossamer.membership import LOCAL as LOOPBACK

FLAGS = (
    "min_np",
    "max_np",
    "host_discovery_script",
    "slots_per_host",
    "elastic_timeout",
    "grace",
    "give_up_after",
    "reset_limit",
    "blacklist_cooldown_range",
)
# Flags that do not go with elastic runs: torchrun's for groups that its agents make, and files by rank.
OTHERS: dict[str, object] = host_lists.OTHER_WAYS | {
    "max_restarts": 0,
    "run_path": False,
    "output_filename": None,
    "prefix_output_with_timestamp": False,
}
OTHERS.pop("nproc_per_node")
LOCAL = "localhost"
TIMEOUT_S = 600.0
# NCCL's watchdog would end a process whose connection to a dead one breaks. Here the group does without the dead one.
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "elastic runs (any of these; the workers live on when one dies)"
    ).add_argument
    add("--min-np", type=int, metavar="M", help="wait for more while there are fewer workers")
    add("--max-np", type=int, metavar="N", help="never more workers; default: one a slot")
    add("--host-discovery-script", metavar="COMMAND", help="run each second; prints lines host:slots")
    add("--slots-per-host", type=int, metavar="S", help="slots of hosts that are printed without a number")
    add("--elastic-timeout", type=float, metavar="SECONDS", help="in which a group must form; default: 600")
    add(
        "--give-up-after",
        type=float,
        metavar="SECONDS",
        help="in which a worker must come back from a group that has failed, before it is killed; default: as long as "
        "--elastic-timeout",
    )
    add("--grace", type=float, metavar="SECONDS", help="in which workers end that were told to; default: 30")
    add("--reset-limit", type=int, metavar="N", help="end if groups would have to form anew more often")
    add(
        "--blacklist-cooldown-range",
        type=float,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds until a slot whose worker died gets another, doubled each time; default: it gets none",
    )


def asked_for(args: argparse.Namespace) -> bool:
    """Returns whether this run is elastic."""
    return any(getattr(args, flag) is not None for flag in FLAGS)


def start(args: argparse.Namespace, arguments: Sequence[str]) -> Outcome:
    """Runs the program elastically, until it ends.

    Args:
        args: the flags of `gossamer run`.
        arguments: the arguments of worker.py, which runs the script.

    Raises:
        ConfigError: the flags contradict each other, the first run of the discovery script fails, or a host has other
            versions.
        CommError: no group could be formed within the limits.
    """
    slots, limits = _plan(args)
    env = here.threads_for(limits.first_size)
    if NCCL_ERRORS not in os.environ:
        env[NCCL_ERRORS] = "0"
    tee = "3" if (args.tee, args.redirects) == ("0", "0") else args.tee
    command = [sys.executable, "-u", str(here.WORKER), *arguments]
    with here.scratch() as folder, whole_lines():
        here.forgive_open_logs(args.log_dir or folder)
        program = Program(command, args.log_dir or folder, env=env, tee=tee, redirects=args.redirects)
        board = Board(address=_address(args, slots))
        driver = Driver(_starter(args, program, slots), slots=slots, board=board, limits=limits)
        try:
            return driver.run()
        except SignalException as error:
            return Outcome(stopped_by=int(error.sigval))
        except KeyboardInterrupt:
            return Outcome(stopped_by=int(signal.SIGINT))


def _address(args: argparse.Namespace, slots: Slots) -> str | None:
    """Returns the address of this host where the board is to listen, or None for every address."""
    others = {slot.host for slot in slots.present() if not _is_local(slot.host)}
    listed = args.host_discovery_script is None
    if listed and not others:
        return LOOPBACK
    for name in host_lists.interfaces(args):
        if own := addresses.of_device(name):
            return own
    # Hosts that a script will name later may lie anywhere.
    ways = {addresses.towards(Host(name, 1).address) for name in others} if listed else set()
    return ways.pop() if len(ways) == 1 else None


@functools.cache
def _is_local(host: str) -> bool:
    return Host(host, 1).is_local()


def _starter(
    args: argparse.Namespace, program: Program, slots: Slots
) -> Callable[[int, Slot, Mapping[str, str]], Worker]:
    """Returns the function that starts a worker, on this host or over ssh."""

    def begin(number: int, slot: Slot, env: Mapping[str, str]) -> Worker:
        others = [each.host for each in slots.present() if not _is_local(each.host)]
        if others:
            addresses.choose_device(Host(others[0], 1).address)  # for the workers here
        if _is_local(slot.host):
            return LocalWorker(program, number, slot, env=env)
        return RemoteWorker(program, number, slot, env=env, args=args)

    return begin


def _plan(args: argparse.Namespace) -> tuple[Slots, Limits]:
    given = args.num_proc if args.nproc_per_node == "1" else args.nproc_per_node
    refuse(args, OTHERS, "elastic: --{} does not go with an elastic run, got {!r}")
    if given is not None and not str(given).isdigit():
        raise ConfigError(f"elastic: -np must be a number in an elastic run, got {given!r}")
    np = None if given is None else int(given)
    listed = host_lists.chosen(argparse.Namespace(**vars(args) | {"num_proc": None}))
    smallest = args.min_np if args.min_np is not None else np or 1
    hosts: Discovery | dict[str, int]
    if args.host_discovery_script is not None:
        if listed is not None:
            raise ConfigError(
                f"elastic: --host-discovery-script excludes -H and --hostfile, got {args.host_discovery_script!r}"
            )
        hosts = Discovery(args.host_discovery_script, default_slots=args.slots_per_host)
    elif listed is not None:
        hosts = {host.name: host.slots for host in listed}
    else:
        hosts = {LOCAL: args.max_np or np or smallest}
    cooldown = args.blacklist_cooldown_range
    slots = Slots(hosts, tuple(cooldown) if cooldown else None)
    largest = args.max_np if args.max_np is not None else sys.maxsize  # hosts may come
    first = np if np is not None else max(smallest, min(largest, len(slots.present())))
    if not 1 <= smallest <= first <= largest:
        raise ConfigError(
            f"elastic: needs 1 <= --min-np <= -np <= --max-np, got {smallest}, {first} and {args.max_np}"
        )
    if cooldown is not None and not 0 <= cooldown[0] <= cooldown[1]:
        raise ConfigError(f"elastic: --blacklist-cooldown-range needs 0 <= MIN <= MAX, got {cooldown}")
    timeout_s = TIMEOUT_S if args.elastic_timeout is None else args.elastic_timeout
    if not timeout_s > 0:
        raise ConfigError(f"elastic: --elastic-timeout must be above 0 s, got {timeout_s:g}")
    if args.reset_limit is not None and args.reset_limit < 0:
        raise ConfigError(f"elastic: --reset-limit must be at least 0, got {args.reset_limit}")
    grace_s = PATIENCE_S if args.grace is None else args.grace
    if not grace_s > 0:
        raise ConfigError(f"elastic: --grace must be above 0 s, got {grace_s:g}")
    give_up_s = timeout_s if args.give_up_after is None else args.give_up_after
    if not 0 < give_up_s <= timeout_s:
        raise ConfigError(
            f"elastic: --give-up-after must be above 0 s and at most --elastic-timeout, {timeout_s:g} s, "
            f"got {give_up_s:g}"
        )
    return slots, Limits(
        smallest,
        largest,
        first,
        timeout_s=timeout_s,
        grace_s=grace_s,
        give_up_s=give_up_s,
        resets=args.reset_limit,
    )
