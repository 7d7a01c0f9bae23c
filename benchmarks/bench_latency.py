"""Sums of few elements between hosts: the backend "gossamer", exact and with a codec, against Gloo, in turns.

Hosts are network namespaces with one rank each. Links have RATE; "far" hosts have FAR_S more between the first host
and the others, there and back. All threads of a rank share one core, as long as there are enough cores, and then much
depends on Gloo's own thread. Needs root.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from harness import arguments, interleaved, paired, report_against, run_hosts, serve, slowest

import gossamer as gs
from gossamer.bench.measuring import note
from gossamer.netlab import missing

RATE = "1gbit"
FAR_S = 0.05
ELEMENTS = 4096
PEER, EXACT, ENCODED = "Gloo", "gossamer", "gossamer, Int8"


def sums(rounds: int, repeats: int) -> dict[str, list[float]]:
    groups = {
        PEER: dist.new_group(backend="gloo"),
        EXACT: dist.new_group(backend="gossamer"),
        ENCODED: dist.new_group(backend="gossamer", pg_options=gs.Options(gs.Int8(), min_bytes=0)),
    }
    x = torch.ones(ELEMENTS)
    bodies = {name: partial(dist.all_reduce, x, group=group) for name, group in groups.items()}
    return slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))


def measure(hosts: int, *, far: bool, quick: bool) -> None:
    job = {"rounds": 2 if quick else 9, "repeats": 1 if quick else 2 if far else 100}
    found = run_hosts(hosts, job, rate=RATE, delays={0: FAR_S / 2} if far else None)
    where = f"{hosts} hosts" + (f", the first {1e3 * FAR_S:g} ms away" if far else "")
    for name in (EXACT, ENCODED):
        report_against(
            f"a sum of {ELEMENTS:,} float32, {name}, {where}",
            [1e3 * s for s in found[name]],
            "ms",
            (PEER, [1e3 * s for s in found[PEER]]),
            paired(found[name], found[PEER]),
            at_most=1.05 if far else None,
        )


def main() -> int:
    options = arguments(__doc__)
    if serve(options, sums):
        return 0
    if why := missing():
        note(f"no hosts, so nothing is measured: {why}")
        return 0
    for hosts in (2,) if options.quick else (2, 4):
        for far in (False, True):
            measure(hosts, far=far, quick=options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
