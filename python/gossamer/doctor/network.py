# Checks of the network between ranks: the device that Gloo takes, MTU, clocks, latency and bandwidth, shared memory.
# They are pure functions of the facts of all ranks and of what meeting.py has measured. checks.py lists them.
"""The network between hosts."""

import statistics
from typing import Any

from gossamer.comm import goes_by_hosts, layout_text
from gossamer.doctor.rows import ERROR, OK, WARNING, Job, Row
from gossamer.units import rate_text, seconds_text

CLOCK_S = 0.1  # with a larger difference, lines of logs are in the wrong order
SLOW_PAIR = 0.5  # a pair below this share of the median bandwidth is slow
FAR_PAIR, FAR_S = 3.0, 1e-3  # a pair is far above this multiple of the median latency, and above FAR_S
MANY_PAIRS = 10  # rows of pairs; further pairs are summed up in one row


def meeting(job: Job) -> list[Row]:
    """All ranks were started, joined one group and answered."""
    advice = {
        "could not join": "see the rows on the interface; a firewall must let all ports through between the hosts",
        "": "read the message; run gossamer doctor on that host alone",
    }
    rows = [
        Row("group", ERROR, failure, next(text for part, text in advice.items() if part in failure))
        for failure in job.failures
    ]
    count, hosts = len(job.facts), len(job.hosts)
    said = (
        f"{count} ranks on {hosts} host{'s' if hosts > 1 else ''} met" if count > 1 else "one process alone"
    )
    return rows or [Row("group", OK, said)]


def interface(job: Job) -> list[Row]:
    """Gloo listens on an address that the other hosts reach. With one host any address is good."""
    rows, said, several = [], [], len(job.hosts) > 1
    for host, ranks in job.hosts.items():
        device, problem = gloo_device(job, ranks[0])
        own = job.of_ranks("interfaces")[ranks[0]]
        good = [each["name"] for each in own if not each["loopback"] and each["address"]]
        name = _towards(job, ranks[0]) or (good[0] if good else "DEVICE")
        advice = (
            f"set GLOO_SOCKET_IFNAME={name} on {host}, or start with gossamer run --network-interfaces {name}"
        )
        if problem:
            fatal = several or "no device" in problem
            later = "" if several else "; with several hosts they would not reach each other"
            rows.append(Row("interface", ERROR if fatal else WARNING, f"{host}: {problem}{later}", advice))
        elif device is not None:
            said.append(f"{host}: {device['name']}, {device['address']}")
    return rows or [Row("interface", OK, "Gloo takes " + "; ".join(said))]


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
            return {
                "name": "the device of the host's name",
                "address": address,
                "mtu": None,
                "loopback": False,
            }, ""
    if addresses:
        said = f"the host's name means {', '.join(addresses)}, which is no address of this host"
    else:
        said = "the host's name has no address"
    return None, f"{said}, so that Gloo listens on the loopback device"


def mtu(job: Job) -> list[Row]:
    """The devices between the hosts take packets of one size."""
    found: dict[str, tuple[str, int]] = {}
    if len(job.hosts) == 1:
        return []
    for host, ranks in job.hosts.items():
        device = gloo_device(job, ranks[0])[0]
        if device is None or device["loopback"]:
            device = _device_towards_master(job, ranks[0])
        if device is not None and device["mtu"] is not None:
            found[host] = (device["name"], device["mtu"])
    if len({size for _, size in found.values()}) > 1:
        least = min(size for _, size in found.values())
        listing = ", ".join(f"{host} {name} {size}" for host, (name, size) in found.items())
        largest = max(found, key=lambda host: found[host][1])
        advice = f"set one for all, e.g. on {largest}: ip link set dev {found[largest][0]} mtu {least}"
        return [Row("MTU", WARNING, f"differs, so that large packets may be lost: {listing}", advice)]
    names = ", ".join(sorted({name for name, _ in found.values()}))
    return [
        Row("MTU", OK, f"{size} on {names} of every host") for size in {size for _, size in found.values()}
    ]


def clocks(job: Job) -> list[Row]:
    """The hosts' clocks agree."""
    between = [pair for pair in job.pairs if _host(job, pair.ranks[0]) != _host(job, pair.ranks[1])]
    if not between:
        return []
    worst = max(between, key=lambda pair: abs(pair.clock_s))
    hosts = [_host(job, rank) for rank in worst.ranks]
    said = f"{hosts[1]} is {1e3 * worst.clock_s:+.2f} ms from {hosts[0]}, to within {1e3 * worst.clock_error_s:.2f} ms"
    if abs(worst.clock_s) > max(CLOCK_S, worst.clock_error_s):
        advice = "run chrony or ntpd on all hosts; logs and timelines are ordered by clocks"
        return [Row("clocks", WARNING, said, advice)]
    return [Row("clocks", OK, f"at most: {said}")]


def pairs(job: Job) -> list[Row]:
    """Latency and bandwidth between each pair, with a warning for a pair that is far slower than the others."""
    if not job.pairs:
        return []
    typical = statistics.median(
        rate for pair in job.pairs for rate in (pair.there_bytes_per_s, pair.back_bytes_per_s)
    )
    near = statistics.median(pair.latency_s for pair in job.pairs)
    rows, fine = [], 0
    for pair in job.pairs:
        one, other = (_host(job, rank) for rank in pair.ranks)
        ranks = " and ".join(map(str, pair.ranks))
        where = f"{one} and {other}" if one != other else f"rank {ranks} of {one}"
        rates = f"{rate_text(pair.there_bytes_per_s)} there, {rate_text(pair.back_bytes_per_s)} back"
        said = f"{where}: {seconds_text(pair.latency_s)}, {rates}"
        slow = min(pair.there_bytes_per_s, pair.back_bytes_per_s) < SLOW_PAIR * typical
        far = pair.latency_s > max(FAR_S, FAR_PAIR * near)
        if slow or far:
            usual = f"the median is {rate_text(typical)}" if slow else f"the median is {seconds_text(near)}"
            advice = "see cables, duplex and other traffic; leave the host out; or compress: gossamer plan says what"
            rows.append(Row("pair", WARNING, f"{said}; {usual}", advice))
        else:
            fine += 1
            if fine <= MANY_PAIRS:
                rows.append(Row("pair", OK, said))
    if fine > MANY_PAIRS:
        said = (
            f"{fine - MANY_PAIRS} more pairs like these; medians {seconds_text(near)}, {rate_text(typical)}"
        )
        rows.append(Row("pair", OK, said))
    return rows


def sharing(job: Job) -> list[Row]:
    """Ranks of one host share memory, and the launcher counts them as one host."""
    rows = []
    for host, ranks in job.hosts.items():
        told = sorted({job.of_ranks("placement")[rank]["local_size"] for rank in ranks})
        if told != [len(ranks)]:
            said = (
                f"{host}: {len(ranks)} ranks run here, and the launcher counted {', '.join(map(str, told))}"
            )
            advice = "set LOCAL_WORLD_SIZE and LOCAL_RANK, or start with gossamer run, which does"
            rows.append(Row("same host", WARNING, said, advice))
        split = [each for each in job.shared or () if set(each) & set(ranks)]
        if len(split) > 1:
            said = f"{host}: its ranks cannot map each other's memory, only those among {split}"
            advice = (
                "start containers of one host with --pid host --ipc host; without, these ranks talk over Gloo"
            )
            rows.append(Row("same host", WARNING, said, advice))
    many = any(len(ranks) > 1 for ranks in job.hosts.values())
    return rows or (
        [Row("same host", OK, "ranks of a host share memory")] if many and job.shared is not None else []
    )


def levels(job: Job) -> list[Row]:
    """Whether a model that is wrapped on these ranks goes by hosts, as the engine decides."""
    hosts = list(job.shared if job.shared is not None else job.hosts.values())
    least, most = min(map(len, hosts)), max(map(len, hosts))
    if least == most:
        where = layout_text(hosts)
    else:
        where = f"{len(hosts)} hosts of {least} to {most} ranks, {least} of each carry"
    if not goes_by_hosts(hosts):
        return [Row("levels", OK, f"{where}: a model sums in one level")]
    said = f"{where}: sums exactly inside a host, codec between hosts"
    if any(each["devices"] for each in job.of_ranks("cuda")):
        said += "; without a codec NCCL sums in its own way"
    return [Row("levels", OK, said, "process_group=gs.Flat() for one level")]


def _host(job: Job, rank: int) -> str:
    return next(host for host, ranks in job.hosts.items() if rank in ranks)


def _towards(job: Job, rank: int) -> str | None:
    device = _device_towards_master(job, rank)
    return device["name"] if device is not None and not device["loopback"] else None


def _device_towards_master(job: Job, rank: int) -> dict[str, Any] | None:
    address = job.of_ranks("towards_master")[rank]
    return next((each for each in job.of_ranks("interfaces")[rank] if each["address"] == address), None)
