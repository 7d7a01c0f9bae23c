"""One of four ranks at a quarter of the speed: DiLoCo that waits for it against DiLoCo whose periods are in seconds.

Tokens are compared with what the four ranks do without averaging, in the same run, and the loss after equal time with
waiting. A step is made to last STEP_S, or four times that on the slow rank, by sleeping, so other work on the machine
shows little. The model is the byte-level GPT of bench_convergence.py. Ranks are threads over Gloo.
"""

import statistics
import sys
import time
from functools import partial

import tasks
import torch
from harness import arguments, paired, report, run_threads

import gossamer as gs

RANKS, SLOW, SLOWER = 4, 3, 4
STEP_S, PERIOD = 0.1, 20
ROWS = 8
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)


def train(task: tasks.Task, kind: str, seed: int, length_s: float) -> tuple[float, float]:
    """The tokens per second of all ranks together, and the validation loss at the end.

    kind: "alone" averages nothing, "waiting" averages every PERIOD steps, "seconds" every PERIOD * STEP_S seconds,
    "counted" does so and weights the ranks by their rows.
    """

    def body(comm: gs.comm.Communicator, _backend: object) -> tuple[int, float, float]:
        torch.manual_seed(seed)
        model = task.model()
        optimizer = torch.optim.Adam(model.parameters(), lr=task.peak_lr)
        step_s = STEP_S * (SLOWER if comm.rank == SLOW else 1)
        period_s = PERIOD * STEP_S
        if kind == "waiting":
            algorithm, rounds = gs.LocalSGD(PERIOD, OUTER), round(length_s / (period_s * SLOWER))
        else:
            algorithm, rounds = (
                gs.LocalSGD(period_s=period_s, outer_optimizer=OUTER),
                round(length_s / period_s),
            )
        wrapped = gs.DataParallel(model, optimizer, algorithm=algorithm, process_group=comm)
        run = model if kind == "alone" else wrapped
        if kind == "alone":
            wrapped.close()
        began, steps = time.monotonic(), 0
        while time.monotonic() - began < length_s if kind == "alone" else algorithm.rounds < rounds:
            begin = time.monotonic()
            [rows] = task.batch((seed << 32) + steps * RANKS + comm.rank)
            if kind == "counted":
                wrapped.count(ROWS)
            optimizer.zero_grad()
            run(rows[:ROWS]).backward()
            time.sleep(max(0.0, begin + step_s - time.monotonic()))
            optimizer.step()
            steps += 1
        seconds = time.monotonic() - began
        wrapped.close()
        with torch.no_grad():
            loss = model(*task.validation).item() if comm.rank == 0 else 0.0
        return steps, seconds, loss

    results = run_threads(RANKS, body)
    tokens = sum(steps / seconds for steps, seconds, _ in results) * ROWS * tasks.CONTEXT
    return tokens, results[0][2]


def main() -> int:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    task = tasks.text()
    seeds, length_s = (1, 2.5) if options.quick else (3, 32.0)
    kinds = ("alone", "waiting", "seconds", "counted")
    found = {kind: [] for kind in kinds}
    for seed in range(seeds):
        for kind in kinds:
            found[kind].append(train(task, kind, seed, length_s))
    tokens = {kind: [each for each, _ in runs] for kind, runs in found.items()}
    losses = {kind: [each for _, each in runs] for kind, runs in found.items()}
    setting = f"DiLoCo, {RANKS} ranks, one at 1/{SLOWER} of the speed"
    for kind, name in (
        ("waiting", "period=20"),
        ("seconds", "period_s=2"),
        ("counted", "period_s=2, counted"),
    ):
        ratios = paired(tokens[kind], tokens["alone"])
        report(
            f"tokens a second of {name}, {setting}",
            statistics.median(tokens[kind]),
            "tokens/s",
            baseline=("no averaging", statistics.median(tokens["alone"])),
            ratio=statistics.median(ratios),
            at_least=None if kind == "waiting" else 0.88,
            target_of="ratio",
            samples=tokens[kind],
        )
        if kind == "waiting":
            continue
        ratios = paired(losses[kind], losses["waiting"])
        report(
            f"validation loss of {name} after {length_s:g} s, {setting}",
            statistics.median(losses[kind]),
            "nats",
            baseline=("period=20", statistics.median(losses["waiting"])),
            ratio=statistics.median(ratios),
            at_most=1.0,
            target_of="ratio",
            samples=losses[kind],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
