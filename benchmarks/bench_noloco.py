"""NoLoCo against DiLoCo: a synchronisation of 8 hosts of which one is far away, and the loss after equal steps.

Hosts are network namespaces with links of RATE. The far host has FAR_S more latency: half of it on the way there, half
on the way back. A round is COMPUTE_S of sleep for the inner steps, then one step with its synchronisation; the two take
turns in the same processes. The loss is that of the GPT of bench_convergence.py, 4 ranks as threads over Gloo. Needs
root.
"""

import sys
import time
from functools import partial
from typing import Any

import tasks
import torch
from bench_convergence import CALM_OUTER
from harness import arguments, paired, report_against, run_hosts, serve
from torch import nn
from trainings import Case, final_loss, report_losses

import gossamer as gs
from gossamer.bench.measuring import note
from gossamer.netlab import missing

HOSTS, FAR_S = 8, 0.05
RATE = "100mbit"
COMPUTE_S = 0.1
PEERS = partial(torch.optim.SGD, lr=0.7, momentum=0.5)
LOSS_PERIODS = (15, 30)


def rounds(elements: int, count: int, turns: int) -> dict[str, Any]:
    """Seconds of a round less its compute, by algorithm and turn: the mean over the ranks."""

    def turn(algorithm: gs.LocalSGD) -> float:
        network = nn.Linear(elements // 1000, 1000, bias=False)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        model = gs.DataParallel(network, optimizer, algorithm=algorithm)
        batch = torch.ones(1, elements // 1000)
        begun = 0.0
        for number in range(count + 1):
            if number == 1:  # the first round makes buffers
                begun = time.monotonic()
            time.sleep(COMPUTE_S)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        took = torch.tensor([(time.monotonic() - begun) / count - COMPUTE_S])
        gs.all_reduce(took, op="mean")
        model.close()
        return took.item()

    makers = {
        "DiLoCo": lambda: gs.LocalSGD(1, CALM_OUTER),
        "NoLoCo": lambda: gs.LocalSGD(1, PEERS, topology="random_pairs"),
    }
    found: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(turns):
        for name, make in makers.items():
            found[name].append(turn(make()))
    return found


def measure_rounds(*, quick: bool) -> None:
    hosts = 2 if quick else HOSTS
    for elements in (100_000,) if quick else (100_000, 400_000, 1_600_000):
        job = {"elements": elements, "count": 2 if quick else 6, "turns": 1 if quick else 3}
        found = run_hosts(hosts, job, rate=RATE, delays={hosts - 1: FAR_S / 2})
        report_against(
            f"a synchronisation of NoLoCo, {elements:,} parameters, {hosts} hosts, {RATE}, one {1e3 * FAR_S:g} ms away",
            [1e3 * s for s in found["NoLoCo"]],
            "ms",
            ("DiLoCo", [1e3 * s for s in found["DiLoCo"]]),
            paired(found["NoLoCo"], found["DiLoCo"]),
            at_most=0.5,
        )


def measure_losses(*, quick: bool) -> None:
    task = tasks.text()
    seeds, steps = (1, 15) if quick else (3, task.steps)
    for period in LOSS_PERIODS[:1] if quick else LOSS_PERIODS:
        cases = (
            Case("DiLoCo, outer momentum 0.5", partial(gs.LocalSGD, period, CALM_OUTER)),
            Case("NoLoCo, momentum 0.5", partial(gs.LocalSGD, period, PEERS, topology="random_pairs")),
        )
        losses = {case.name: [final_loss(task, case, seed, steps) for seed in range(seeds)] for case in cases}
        peer, ours = losses
        name = f"{ours}, period {period}"
        report_losses(name, task, steps, losses[ours], (peer, losses[peer]), 1.01)


def main() -> int:
    options = arguments(__doc__)
    if serve(options, rounds):
        return 0
    if why := missing():
        note(f"no hosts, so no synchronisations: {why}")
    else:
        measure_rounds(quick=options.quick)
    measure_losses(quick=options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
