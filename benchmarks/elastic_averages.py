"""What elastic_loop.py trains by with "local" or "rounds" in its plan.

A run with "local" is replayed in one process. Of one with "rounds" each mean is checked.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from elastic_loop import SAMPLES, Numbers, build, journals, loss_of
from torch import nn

import gossamer as gs
from gossamer.engine.agree import checksum_of

OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class NotedLocalSGD(gs.LocalSGD):
    """gs.LocalSGD that notes each averaging: its number, the ranks in it, and the bits of all anchors."""

    def __init__(self, note: Callable[..., None], *, outer: bool = False, **settings: Any) -> None:
        super().__init__(outer_optimizer=OUTER if outer else None, **settings)
        self._note = note

    def _take(self, fragment: int) -> None:
        super()._take(fragment)
        self._note(average=self.rounds, size=self._background.comm.size, bits=checksum_of(self.anchors))

    def follow(self, own: dict[str, Any], other: dict[str, Any]) -> None:
        super().follow(own, other)
        self._note(late_after=own["rounds"], back_after=other["rounds"])


class NotedAsync(gs.AsyncModelAverage):
    """gs.AsyncModelAverage that notes each mean: round, ranks, bits, sum, and this rank's share."""

    def __init__(self, note: Callable[..., None], **settings: Any) -> None:
        super().__init__(**settings)
        self._note = note

    def _round(self, comm: Any, buckets: list[Any], question: Any, *, own: int) -> tuple[int, bool]:
        training, all_ended = super()._round(comm, buckets, question, own=own)
        if own:
            means = [bucket.flat("mean").clone() for bucket in buckets]
            totals = [
                sum(bucket.flat(name).sum().item() for bucket in buckets) for name in ("mean", "snapshot")
            ]
            self._note(
                mean=self.rounds + 1,
                ranks=training,
                bits=checksum_of(means),
                total=totals[0],
                share=totals[1],
            )
        return training, all_ended

    def _add_result(self) -> None:
        super()._add_result()
        self._note(added=self.rounds)


class Averages:
    """What all workers have written, by averaging.

    Args:
        lines: the lines of each worker, by its number.
        period: steps between two averagings of a rank that is not told to end.
    """

    def __init__(self, lines: dict[int, list[dict]], period: int) -> None:
        self.period = period
        self.draws: dict[int, dict[int, list[dict]]] = defaultdict(dict)  # by averagings before, and worker
        self.taken: dict[int, dict[int, dict]] = defaultdict(dict)  # by averaging and worker
        self.reached: dict[int, int] = {}  # averagings that each worker has the result of
        # By worker: averagings before, the worker whose inner optimizer it copied, and that one's steps since the last.
        self.began: dict[int, tuple[int, int, int]] = {}
        # By worker: averagings before it was left out, and then as above for when it came back.
        self.late: dict[int, tuple[int, int, int, int]] = {}
        given: dict[int, list[tuple[float, int, int]]] = defaultdict(
            list
        )  # by worker: when, and the last two of these
        for worker, own in lines.items():
            now = 0  # averagings so far
            for line in own:
                now = line.get("average", line.get("rounds", now))
                if "gives" in line or not line.get("copied", True):
                    steps = len(self.draws[now].get(worker, ()))
                    for newcomer in [line["gives"]] if "gives" in line else line["new"]:
                        given[newcomer].append((line["time"], worker, steps))
                if "average" in line:
                    self.taken[line["average"]][worker] = line
                if "rounds" in line:
                    self.reached[worker] = line["rounds"]
                if "draw" in line:
                    drawn = line
                    self.draws[line["rounds"]].setdefault(worker, []).append(drawn)
                if "step" in line:
                    drawn["loss"] = line["loss"]
        for worker, own in lines.items():
            for line in own:
                if {"late_after", "begin"} & set(line):
                    copied = [each for each in sorted(given[worker]) if each[0] <= line["time"]]
                    source = copied[-1][1:] if copied else (worker, 0)
                if "late_after" in line:
                    self.late[worker] = line["late_after"], line["back_after"], *source
                if "begin" in line:
                    self.began[worker] = line["rounds"], *source

    def members(self, number: int) -> list[int]:
        """The workers whose weights are in an averaging."""
        taken = self.taken[number]
        (size,) = {line["size"] for line in taken.values()}
        certain = {worker for worker, reached in self.reached.items() if reached >= number} | set(taken)
        certain = {worker for worker in certain if self.began[worker][0] < number}
        certain -= {worker for worker, (out, back, *_) in self.late.items() if out < number <= back}
        if len(certain) < size:  # one that died after it had sent its weights
            certain |= {w for w, own in self.draws[number - 1].items() if len(own) == self.period}
        assert len(certain) == size, (number, size, sorted(certain))
        return sorted(certain)


def check(
    folder: Path, *, period: int, outer: bool = False, counts: bool = False, exact: bool = True
) -> dict[str, float]:
    """Replay the run in one process, if it is exact. Return averagings, and the worst relative deviation of a loss."""
    lines = journals(folder)
    last = check_anchors(lines)
    run = Averages(lines, period)
    worst = replay(folder, run, last, outer=outer, counts=counts) if exact else 0.0
    return {"averagings": last, "worst": worst}


def check_anchors(lines: dict[int, list[dict]]) -> int:
    """Check that no averaging was lost, or taken twice, or had two results. Return their number."""
    bits: dict[int, set[int]] = defaultdict(set)
    for worker, own in lines.items():
        taken = [line["average"] for line in own if "average" in line]
        assert taken == sorted(set(taken)), f"worker {worker} has averaged twice: {taken}"
        for line in own:
            if "average" in line:
                bits[line["average"]].add(line["bits"])
    assert sorted(bits) == list(range(1, len(bits) + 1)), "an averaging is missing"
    for number, of_number in bits.items():
        assert len(of_number) == 1, f"averaging {number}: the ranks differ"
    return len(bits)


def check_rounds(lines: dict[int, list[dict]]) -> dict[str, float]:
    """Check the means of all rounds. Return rounds, and the worst deviation of a mean from that of the shares."""
    means: dict[tuple[int, int], list[dict]] = defaultdict(list)  # by group and round
    for worker, own in lines.items():
        added = [line["added"] for line in own if "added" in line]
        assert added == sorted(set(added)), f"worker {worker} has added a round twice: {added}"
        for line in own:
            if "mean" in line:
                means[line["group"], line["mean"]].append(line)
    worst = 0.0
    for key, of_round in means.items():
        assert len({(line["bits"], line["ranks"]) for line in of_round}) == 1, f"group and round {key} differ"
        if len(of_round) == of_round[0]["ranks"]:  # else one has died before it noted its share
            mean = sum(line["share"] for line in of_round) / len(of_round)
            worst = max(worst, abs(of_round[0]["total"] / mean - 1))
    return {"rounds": max(number for _, number in means), "worst": worst}


def times_drawn(folder: Path) -> dict[str, float]:
    """Return ended epochs, samples that an epoch has left out, and how often each sample was drawn in an epoch."""
    drawn: dict[int, Counter] = defaultdict(Counter)  # by epoch
    for own in journals(folder).values():
        for line in own:
            if "draw" in line:
                drawn[line["epoch"]].update(line["indices"])
    ended, left_out = max(drawn), 0
    for index in range(SAMPLES):
        missing_since = None
        for epoch in range(ended):
            times = drawn[epoch][index]
            if times == 0 and missing_since is None:
                missing_since = epoch  # it may have been left to the next epoch, and once more
            elif times > 1:
                missing_since = None
        left_out += missing_since is not None and missing_since < ended - 3
    total = sum(drawn[epoch].total() for epoch in range(ended))
    return {"epochs": ended, "left_out": left_out, "times_drawn": total / SAMPLES / ended}


def replay(folder: Path, run: Averages, last: int, *, outer: bool, counts: bool) -> float:
    data, worst = Numbers(), 0.0
    anchor, _ = build(0)
    anchor.load_state_dict(torch.load(folder / "start.pt"))
    anchors = list(anchor.parameters())
    step_outer = OUTER(anchors) if outer else None
    inner: dict[int, torch.optim.Optimizer] = {}  # by worker
    gaps: dict[int, list[torch.Tensor]] = {}  # by worker that was late: its weights - the anchor
    for number in range(1, last + 1):
        for worker, (before, copied, steps) in run.began.items():
            if before == number - 1:
                inner[worker] = copy.deepcopy(inner.get(copied)) or fresh()
                train(anchor, inner[worker], run.draws[before].get(copied, [])[:steps], data)
        for worker, (out, back, copied, steps) in run.late.items():
            if out == number - 1:
                model, _ = train(anchor, inner[worker], run.draws[out][worker], data)
                gaps[worker] = [
                    (own - old).detach() for own, old in zip(model.parameters(), anchors, strict=True)
                ]
            if back == number - 1:
                inner[worker] = copy.deepcopy(inner[copied])
                train(anchor, inner[worker], run.draws[back][copied][:steps], data)
        weights: list[list[torch.Tensor]] = []
        samples: list[int] = []
        for worker in run.members(number):
            batches = run.draws[number - 1].get(worker, [])
            if not batches and run.began[worker][0] == number - 1 > 0:
                continue  # it has come just now, and has no weight
            out, back, *_ = run.late.get(worker, (0, -1))
            gap = gaps[worker] if back == number - 1 else None
            model, deviation = train(anchor, inner[worker], batches, data, gap)
            weights.append([param.detach().clone() for param in model.parameters()])
            steps = len(batches) + (len(run.draws[out][worker]) if gap else 0)
            samples.append(steps * (1 + worker) if counts else 1)
            worst = max(worst, deviation)
        for i, param in enumerate(anchors):
            mean = sum(own[i] * seen for own, seen in zip(weights, samples, strict=True)) / sum(samples)
            with torch.no_grad():
                if step_outer is None:
                    param.copy_(mean)
                else:
                    param.grad = param - mean
        if step_outer is not None:
            step_outer.step()
    return worst


def fresh() -> torch.optim.Optimizer:
    return build(0)[1]


def train(
    anchor: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict],
    data: Numbers,
    gap: list[torch.Tensor] | None = None,
) -> tuple[nn.Module, float]:
    """Train from the anchor on, or from so far beside it, with the state of a worker's optimizer.

    The learning rates are those of elastic_loop.py.
    """
    model, worst = copy.deepcopy(anchor), 0.0
    with torch.no_grad():
        for param, offset in zip(model.parameters(), gap or (), strict=gap is not None):
            param.add_(offset)
    of_worker = torch.optim.Adam(model.parameters())
    of_worker.load_state_dict(optimizer.state_dict())
    for batch in batches:
        of_worker.param_groups[0]["lr"] = 0.01 * 0.9 ** (batch["draw"] // 20)
        loss = loss_of(model, data, batch["indices"])
        if "loss" in batch:
            worst = max(worst, abs(batch["loss"] / loss.item() - 1))
        of_worker.zero_grad()
        loss.backward()
        of_worker.step()
    optimizer.load_state_dict(of_worker.state_dict())
    return model, worst
