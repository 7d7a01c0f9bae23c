# The check of where a job listens: torch's store and Gloo's ports answer whoever reaches them, so they must not be
# reached from the internet. It is a pure function of the facts of all ranks. checks.py lists it.
"""What listens on a public address."""

import ipaddress
from collections.abc import Iterable

from gossamer.doctor.network import gloo_device
from gossamer.doctor.rows import WARNING, Findings, Job, check

WHO = "whoever reaches it can change what is sent"
PRIVATELY = "start with gossamer run, on several hosts with --network-interfaces of a private network"
LET_IN = "let a firewall pass the hosts of this job alone"


@check("public address")
def exposed(job: Job) -> Findings:
    """No store and no Gloo port listens on an address that the internet reaches."""
    public = {host: public_among(own) for host, own in job.of_hosts("addresses").items()}
    listening = job.of_ranks("listening")
    for host, ranks in job.hosts.items():
        for address, device in _of_gloo(job, ranks):
            said = f"{host}: Gloo listens on {address} ({device}), a public address; {WHO}"
            yield WARNING, said, f"set GLOO_SOCKET_IFNAME to a device of a private network, or {LET_IN}"
        served = {tuple(each.values()) for rank in ranks for each in listening[rank]}
        for what, address, port in sorted(served):
            if reached := _covered(address, public[host]):
                said = f"{host}: the {what} listens on {_place(address, port)}, so on the public {', '.join(reached)}"
                yield WARNING, f"{said}; {WHO}", f"{PRIVATELY}, or {LET_IN}"
    there = "; ".join(f"{host}: {', '.join(own)}" for host, own in public.items() if own)
    return f"no store and no Gloo port listens on it: {there}" if there else "no host has one"


def public_among(addresses: Iterable[str]) -> list[str]:
    """Returns the addresses that the internet can reach: not private, loopback, link-local or of a provider (CGNAT)."""
    return [address for address in addresses if _numbers(address).is_global]


def _covered(address: str, own: list[str]) -> list[str]:
    """Returns those of a host's own addresses on which a socket that is bound to the address answers."""
    numbers = _numbers(address)
    if not numbers.is_unspecified:
        return [each for each in own if _numbers(each) == numbers]
    # A socket of torch's that is bound to :: answers on IPv4 too.
    return [each for each in own if numbers.version == 6 or _numbers(each).version == 4]


def _of_gloo(job: Job, ranks: list[int]) -> list[tuple[str, str]]:
    """Returns the public addresses that Gloo takes on the ranks of a host, each with its device."""
    found = [
        device for device, _ in (gloo_device(job, rank) for rank in ranks) if device and device["address"]
    ]
    named = {device["address"]: device["name"] for device in found}
    return [(address, named[address]) for address in public_among(named)]


def _numbers(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns an address without its zone; one of IPv4 that is written as one of IPv6 is of IPv4."""
    numbers = ipaddress.ip_address(address.partition("%")[0])
    mapped = numbers.ipv4_mapped if numbers.version == 6 else None
    return mapped or numbers


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
