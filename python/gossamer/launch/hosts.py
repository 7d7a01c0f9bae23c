# The hosts of `gossamer run -H`: parses them, fills them with workers, and says whether a host is this machine. ssh.py
# reaches them, fleet.py runs workers on them. run.py calls it.
"""Hosts and slots."""

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.errors import ConfigError

# Options of torchrun that say in another way where workers are, and their defaults.
OTHER_WAYS: dict[str, object] = {
    "nnodes": "1:1",
    "nproc_per_node": "1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "node_rank": 0,
    "standalone": False,
}


@dataclass(frozen=True)
class Host:
    """A machine by the name that the user gave, and the number of its workers."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The name without a user."""
        return self.name.rpartition("@")[2]

    def is_local(self) -> bool:
        """Returns whether an address of this host belongs to this machine."""
        if self.address in ("localhost", socket.gethostname()):
            return True
        try:
            found = socket.getaddrinfo(self.address, None, type=socket.SOCK_DGRAM)
        except OSError:
            return False  # a name that only ssh's own configuration knows
        return any(_can_bind(family, address) for family, _, _, _, address in found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several hosts, reached over ssh").add_argument
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, and how many workers each may have")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same, a line each: HOST slots=SLOTS")
    add("-p", "--ssh-port", dest="remote_port", type=int, metavar="PORT", help="port of ssh on all hosts")
    add("-i", "--ssh-identity-file", dest="identity_file", metavar="FILE", help="private key for ssh")
    add("--network-interfaces", "--network-interface", "--nics", dest="interfaces", action="append",
        metavar="NAME,...", help="devices that workers talk through")  # fmt: skip
    add("-x", dest="exported", action="append", default=[], metavar="NAME[=VALUE]",
        help="an environment variable for all workers; may be given several times")  # fmt: skip
    add("--output-filename", metavar="FOLDER", help="write FOLDER/rank.N/stdout and stderr too")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        help="put the time before each line of output")  # fmt: skip
    add("--verbose", action="store_true", help="say what is started where")


def chosen(args: argparse.Namespace) -> list[Host] | None:
    """Returns the hosts that get workers, with the number of each; None if the user named no host.

    Raises:
        ConfigError: a host is named twice or is not HOST:SLOTS, there are more workers than slots, or torchrun's own
            options for several hosts are given too.
    """
    if args.hosts is None and args.hostfile is None:
        return None
    if args.hosts is not None and args.hostfile is not None:
        raise ConfigError(f"-H and --hostfile exclude each other, got {args.hosts!r} and {args.hostfile!r}")
    why = "-np is the number of workers on all hosts"
    refuse(args, OTHER_WAYS, "-H and --hostfile do not go with --{}, got {!r}; " + why)
    found = parse_hosts(args.hosts) if args.hosts is not None else read_hostfile(args.hostfile)
    return fill(found, args.num_proc)


def refuse(args: argparse.Namespace, flags: Mapping[str, object], message: str) -> None:
    """Raises ConfigError if one of the flags, given with their defaults, is set; "1" is a default of all."""
    for name, usual in flags.items():
        if (value := getattr(args, name)) not in (usual, "1"):
            raise ConfigError(message.format(name.replace("_", "-"), value))


def export(args: argparse.Namespace) -> None:
    """Puts the values of -x and --network-interfaces into the environment, which the workers inherit.

    Raises:
        ConfigError: -x has no name, or its variable is not set.
    """
    for entry in args.exported:
        name, given, value = entry.partition("=")
        if not name or (not given and name not in os.environ):
            raise ConfigError(f"-x needs NAME=VALUE, or the name of a variable that is set, got {entry!r}")
        if given:
            os.environ[name] = value
    if names := interfaces(args):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[variable] = ",".join(names)
        os.environ["HOROVOD_GLOO_IFACE"] = names[0]


def interfaces(args: argparse.Namespace) -> list[str]:
    """Returns the network devices of --network-interfaces."""
    return [name for given in args.interfaces or [] for name in given.split(",") if name]


def parse_hosts(text: str) -> list[Host]:
    """Parses ``"a:2,user@b:1"``. A host without a number has one slot."""
    return _parsed([entry.strip() for entry in text.split(",")], "-H")


def read_hostfile(path: str) -> list[Host]:
    """Reads lines of ``HOST slots=N`` or ``HOST:N``. Empty lines and text after # are left out."""
    try:
        with open(path) as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}") from error
    return _parsed([re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines], f"--hostfile {path}")


def fill(hosts: Sequence[Host], wanted: str | int | None) -> list[Host]:
    """Returns the first hosts, with ``wanted`` workers among them; None: a worker in each slot."""
    total = sum(host.slots for host in hosts)
    listing = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
    try:
        left = total if wanted is None else int(wanted)
    except ValueError:
        left = 0
    if not 1 <= left <= total:
        raise ConfigError(f"-np must be from 1 to the {total} slots of {listing}, got {wanted}")
    filled = []
    for host in hosts:
        if take := min(host.slots, left):
            filled.append(Host(host.name, take))
            left -= take
    return filled


def _host(entry: str, where: str) -> Host:
    match = re.fullmatch(r"((?:[^\s:@\[\]]+@)?(?:[^\s:@\[\]]+|\[[0-9a-fA-F:.%]+\]))(?::(\d+))?", entry)
    # A name that begins with a dash would be an option of ssh.
    if match is None or entry.startswith("-"):
        raise ConfigError(f"{where}: a host is written HOST:SLOTS, got {entry!r}")
    return Host(match[1].replace("[", "").replace("]", ""), int(match[2] or 1))


def _parsed(entries: Sequence[str], where: str) -> list[Host]:
    hosts = [_host(entry, where) for entry in entries if entry]
    names = [host.name for host in hosts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{where}: a host is named once, with all its slots; got {', '.join(twice)} several times"
        )
    if not hosts:
        raise ConfigError(f"{where} names no host")
    return hosts


def _can_bind(family: int, address: tuple) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
