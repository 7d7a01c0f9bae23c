# Checks of the network between ranks: the device that Gloo takes, MTU, clocks, latency and bandwidth, shared memory.
# They are pure functions of the facts of all ranks and of what meeting.py has measured. checks.py lists them.
"""The network between hosts."""

import statistics
from typing import Any

from gossamer.comm import goes_by_hosts, layout_text
from gossamer.doctor.rows import ERROR, OK, WARNING, Findings, Job, check, how_many
from gossamer.units import rate_text, seconds_text

CLOCK_S = 0.1  # with a larger difference, lines of logs are in the wrong order
SLOW_PAIR = 0.5  # a pair below this share of the median bandwidth is slow
FAR_PAIR, FAR_S = 3.0, 1e-3  # a pair is far above this multiple of the median latency, and above FAR_S
MANY_PAIRS = 10  # rows of pairs; further pairs are summed up in one row


@check("group")
def meeting(job: Job) -> Findings:
    """All ranks were started, joined one group and answered."""
    for failure in job.failures:
        if "could not join" in failure:
            advice = "see the rows on the interface; a firewall must let all ports through between the hosts"
        else:
            advice = "read the message; run gossamer doctor on that host alone"
        yield ERROR, failure, advice
    return f"{how_many(job)} met" if len(job.facts) > 1 else "one process alone"


@check("interface")
def interface(job: Job) -> Findings:
    """Gloo listens on an address that the other hosts reach. With one host any address is good."""
    said, several = [], len(job.hosts) > 1
    for host, ranks in job.hosts.items():
        device, problem = gloo_device(job, ranks[0])
        if problem:
            own, towards = job.of_ranks("interfaces")[ranks[0]], _device_towards_master(job, ranks[0])
            good = [
                each["name"] for each in (towards, *own) if each and not each["loopback"] and each["address"]
            ]
            name = good[0] if good else "DEVICE"
            fatal = several or "no device" in problem
            later = "" if several else "; with several hosts they would not reach each other"
            advice = f"set GLOO_SOCKET_IFNAME={name} on {host}, or start with gossamer run --network-interfaces {name}"
            yield ERROR if fatal else WARNING, f"{host}: {problem}{later}", advice
        elif device is not None:
            said.append(f"{host}: {device['name']}, {device['address']}")
    return "Gloo takes " + "; ".join(said)


def gloo_device(job: Job, rank: int) -> tuple[dict[str, Any] | None, str]:
    """Returns the network device that Gloo takes on a rank, and what is wrong with it, or an empty text."""
    own = job.of_ranks("interfaces")[rank]
    given = job.of_ranks("environment")[rank].get("GLOO_SOCKET_IFNAME", "")
    if given:
        names = [name for name in given.split(",") if name]
        found = [each for name in names for each in own if each["name"] == name]
        if len(found) < len(names):
            known = ", ".join(each["name"] for each in own)
            return None, f"GLOO_SOCKET_IFNAME={given}, and no device of that name is up; there are {known}"
        if found[0]["loopback"]:
            return found[0], f"GLOO_SOCKET_IFNAME={given} is a loopback device"
        return found[0], ""
    addresses = job.of_ranks("resolved")[rank]
    by_address = {each["address"]: each for each in own}
    for address in addresses:  # Gloo takes the first that it can listen on
        if address.startswith(("127.", "::1")):
            return None, f"the host's name means {address}, a loopback address, on which Gloo then listens"
        if address in by_address:
            return by_address[address], ""
        if ":" in address:  # IPv6: its device is not among the facts
            unknown = {"name": "the device of the host's name", "mtu": None, "loopback": False}
            return unknown | {"address": address}, ""
    said = "the host's name has no address"
    if addresses:
        said = f"the host's name means {', '.join(addresses)}, which is no address of this host"
    return None, f"{said}, so that Gloo listens on the loopback device"


@check("MTU")
def mtu(job: Job) -> Findings:
    """The devices between the hosts take packets of one size."""
    if len(job.hosts) == 1:
        return ""
    found: dict[str, dict[str, Any]] = {}
    for host, ranks in job.hosts.items():
        device = gloo_device(job, ranks[0])[0]
        if device is None or device["loopback"]:
            device = _device_towards_master(job, ranks[0])
        if device is not None and device["mtu"] is not None:
            found[host] = device
    sizes = sorted({device["mtu"] for device in found.values()})
    if len(sizes) > 1:
        listing = ", ".join(f"{host} {device['name']} {device['mtu']}" for host, device in found.items())
        largest = max(found, key=lambda host: found[host]["mtu"])
        command = f"ip link set dev {found[largest]['name']} mtu {sizes[0]}"
        advice = f"set one for all, e.g. on {largest}: {command}"
        yield WARNING, f"differs, so that large packets may be lost: {listing}", advice
    names = ", ".join(sorted({device["name"] for device in found.values()}))
    return f"{sizes[0]} on {names} of every host" if sizes else ""


@check("clocks")
def clocks(job: Job) -> Findings:
    """The hosts' clocks agree."""
    between = [pair for pair in job.pairs if _host(job, pair.ranks[0]) != _host(job, pair.ranks[1])]
    if not between:
        return ""
    worst = max(between, key=lambda pair: abs(pair.clock_s))
    one, other = (_host(job, rank) for rank in worst.ranks)
    said = (
        f"{other} is {1e3 * worst.clock_s:+.2f} ms from {one}, to within {1e3 * worst.clock_error_s:.2f} ms"
    )
    if abs(worst.clock_s) > max(CLOCK_S, worst.clock_error_s):
        yield WARNING, said, "run chrony or ntpd on all hosts; logs and timelines are ordered by clocks"
    return f"at most: {said}"


@check("pair")
def pairs(job: Job) -> Findings:
    """Latency and bandwidth between each pair, with a warning for a pair that is far slower than the others."""
    if not job.pairs:
        return ""
    rates = [rate for pair in job.pairs for rate in (pair.there_bytes_per_s, pair.back_bytes_per_s)]
    typical, near = statistics.median(rates), statistics.median(pair.latency_s for pair in job.pairs)
    fine = 0
    for pair in job.pairs:
        one, other = (_host(job, rank) for rank in pair.ranks)
        where = (
            f"{one} and {other}" if one != other else f"rank {' and '.join(map(str, pair.ranks))} of {one}"
        )
        there, back = pair.there_bytes_per_s, pair.back_bytes_per_s
        said = f"{where}: {seconds_text(pair.latency_s)}, {rate_text(there)} there, {rate_text(back)} back"
        slow = min(there, back) < SLOW_PAIR * typical
        if slow or pair.latency_s > max(FAR_S, FAR_PAIR * near):
            usual = f"the median is {rate_text(typical) if slow else seconds_text(near)}"
            advice = "see cables, duplex and other traffic; leave the host out; or compress: gossamer plan says what"
            yield WARNING, f"{said}; {usual}", advice
        else:
            fine += 1
            if fine <= MANY_PAIRS:
                yield OK, said, ""
    if fine > MANY_PAIRS:
        medians = f"medians {seconds_text(near)}, {rate_text(typical)}"
        yield OK, f"{fine - MANY_PAIRS} more pairs like these; {medians}", ""
    return ""


@check("same host")
def sharing(job: Job) -> Findings:
    """Ranks of one host share memory, and the launcher counts them as one host."""
    for host, ranks in job.hosts.items():
        told = sorted({job.of_ranks("placement")[rank]["local_size"] for rank in ranks})
        if told != [len(ranks)]:
            counted = ", ".join(map(str, told))
            advice = "set LOCAL_WORLD_SIZE and LOCAL_RANK, or start with gossamer run, which does"
            yield WARNING, f"{host}: {len(ranks)} ranks run here, and the launcher counted {counted}", advice
        split = [each for each in job.shared or () if set(each) & set(ranks)]
        if len(split) > 1:
            said = f"{host}: its ranks cannot map each other's memory, only those among {split}"
            advice = (
                "start containers of one host with --pid host --ipc host; without, these ranks talk over Gloo"
            )
            yield WARNING, said, advice
    many = any(len(ranks) > 1 for ranks in job.hosts.values())
    return "ranks of a host share memory" if many and job.shared is not None else ""


@check("levels")
def levels(job: Job) -> Findings:
    """Whether a model that is wrapped on these ranks goes by hosts, as the engine decides."""
    hosts = list(job.shared if job.shared is not None else job.hosts.values())
    least, most = min(map(len, hosts)), max(map(len, hosts))
    where = f"{len(hosts)} hosts of {least} to {most} ranks, {least} of each carry"
    if least == most:
        where = layout_text(hosts)
    if not goes_by_hosts(hosts):
        return f"{where}: a model sums in one level"
    said = f"{where}: sums exactly inside a host, codec between hosts"
    if any(each["devices"] for each in job.of_ranks("cuda")):
        said += "; without a codec NCCL sums in its own way"
    yield OK, said, "process_group=gs.Flat() for one level"
    return ""


def _host(job: Job, rank: int) -> str:
    return next(host for host, ranks in job.hosts.items() if rank in ranks)


def _device_towards_master(job: Job, rank: int) -> dict[str, Any] | None:
    address = job.of_ranks("towards_master")[rank]
    return next((each for each in job.of_ranks("interfaces")[rank] if each["address"] == address), None)
