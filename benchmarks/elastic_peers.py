"""Replays a run of elastic_loop.py with "local" and a topology in its plan: each worker has an anchor of its own."""

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from elastic_averages import OUTER, NotedLocalSGD, fresh, train
from elastic_loop import Numbers, build, journals

from gossamer.engine.agree import checksum_of
from gossamer.topology import Topology, mixing_matrix


class NotedPeers(NotedLocalSGD):
    """gs.LocalSGD with a topology. It notes what a rank sends to its peers, and each exact mean of all anchors.

    Args:
        place: returns the group and this worker's rank in it.
    """

    def __init__(
        self, note: Callable[..., None], place: Callable[[], dict[str, int]], **settings: Any
    ) -> None:
        super().__init__(note, **settings)
        self._place = place

    def _send(self, fragment: int, step: int) -> None:
        number = self.rounds + len(self._arrivals)
        comm = self._background.comm
        self._note(
            sends=number, alone=number < self._alone_until, among=[comm.rank, comm.size], **self._place()
        )
        super()._send(fragment, step)

    def average_all(self, mean: Callable[[list[torch.Tensor]], None]) -> None:
        self._note(meets=self.rounds, **self._place())
        super().average_all(mean)
        self._note(met=self.rounds, bits=checksum_of(self.anchors), **self._place())


class Worker:
    """One worker of the replay.

    Args:
        lines: what it has written.
    """

    def __init__(self, lines: list[dict]) -> None:
        self.lines, self.at = lines, 0
        self.anchor, self.inner = build(0)[0], fresh()
        self.outer = OUTER(list(self.anchor.parameters()))
        self.model = self.anchor

    def params(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.anchor.parameters()]

    def momenta(self) -> list[torch.Tensor]:
        state = self.outer.state
        return [state[param]["momentum_buffer"].clone() for param in self.anchor.parameters() if state[param]]

    def average(self, weights: list[torch.Tensor], *, outer: bool) -> None:
        """Take a mean of weights, in the place of this worker's own."""
        for param, mean in zip(self.anchor.parameters(), weights, strict=True):
            if outer:
                param.grad = param.detach() - mean
            else:
                param.data.copy_(mean)
        if outer:
            self.outer.step()
        self.begin_at_anchor()

    def begin_at_anchor(self) -> None:
        self.model = copy.deepcopy(self.anchor)

    def weights(self) -> list[torch.Tensor]:
        return [param.detach() for param in self.model.parameters()]


def check(folder: Path, *, topology: Topology, outer: bool = False, exact: bool = True) -> dict[str, float]:
    """Check that no averaging was taken twice, and that exact means were equal on all ranks. Replay an exact run.

    Return averagings, exact means, and the worst relative deviation of a loss.
    """
    replay = Replay(folder, topology, outer=outer)
    if exact:
        replay.run()
    return {"averagings": replay.averagings, "means": len(replay.bits), "worst": replay.worst}


class Replay:
    """All workers, each as far as the others allow. See check()."""

    def __init__(self, folder: Path, topology: Topology, *, outer: bool) -> None:
        self.topology, self.outer, self.data, self.worst = topology, outer, Numbers(), 0.0
        self.workers = {number: Worker(own) for number, own in journals(folder).items()}
        start = torch.load(folder / "start.pt")
        for worker in self.workers.values():
            worker.anchor.load_state_dict(start)
            worker.begin_at_anchor()
        self.sent: dict[tuple[int, int, int], list[torch.Tensor]] = {}  # by group, averaging and place in it
        self.met: dict[tuple[int, int], dict[int, tuple]] = defaultdict(
            dict
        )  # by group and averaging, and rank
        self.given: dict[int, torch.optim.Optimizer] = {}  # by newcomer
        self.groups: dict[tuple[int, int], set[int]] = defaultdict(set)  # who is to meet
        self.bits: dict[tuple[int, int], set[int]] = defaultdict(set)
        for worker in self.workers.values():
            taken = [line["average"] for line in worker.lines if "average" in line]
            assert taken == sorted(set(taken)), f"a worker has averaged twice: {taken}"
            for line in worker.lines:
                if "meets" in line:
                    self.groups[line["group"], line["meets"]].add(line["rank"])
                if "met" in line:
                    self.bits[line["group"], line["met"]].add(line["bits"])
        assert all(len(bits) == 1 for bits in self.bits.values()), "the ranks differ after an exact mean"

    @property
    def averagings(self) -> int:
        """The number of averagings that all workers have taken in turn."""
        return max(line.get("average", 0) for each in self.workers.values() for line in each.lines)

    def run(self) -> None:
        """Compute what all workers did."""
        goes_on = True
        while goes_on:
            goes_on = False
            for number, worker in self.workers.items():
                while worker.at < len(worker.lines) and self.take(number, worker, worker.lines[worker.at]):
                    worker.at, goes_on = worker.at + 1, True
        stuck = {
            number: each.lines[each.at] for number, each in self.workers.items() if each.at < len(each.lines)
        }
        assert not stuck, f"no worker has sent what these have taken: {stuck}"

    def take(self, number: int, worker: Worker, line: dict) -> bool:
        """Do what a line says. Return False if it needs what another worker has not done yet."""
        if "begin" in line and line["rounds"]:
            return self.begin(number, worker, line)
        if "draw" in line:
            worker.drawn = line
        elif "step" in line:
            worker.model, deviation = train(
                worker.model, worker.inner, [worker.drawn | {"loss": line["loss"]}], self.data
            )
            self.worst = max(self.worst, deviation)
        elif "gives" in line or not line.get("copied", True):
            for newcomer in [line["gives"]] if "gives" in line else line["new"]:
                self.given[newcomer] = copy.deepcopy(worker.inner)
        elif "sends" in line:
            worker.sends = line
            if not line["alone"]:
                self.sent[line["group"], line["sends"], line["among"][0]] = worker.weights()
        elif "average" in line:
            return self.average(worker, line)
        elif "meets" in line:
            self.met[line["group"], line["meets"]][line["rank"]] = (worker.params(), worker.momenta())
        elif "met" in line:
            return self.take_mean(worker, (line["group"], line["met"]))
        return True

    def average(self, worker: Worker, line: dict) -> bool:
        sends = worker.sends
        rank, size = sends["among"]
        assert sends["sends"] == line["average"] - 1, (sends, line)
        if sends["alone"]:
            worker.average(worker.weights(), outer=self.outer)
            return True
        shares = mixing_matrix(self.topology, sends["sends"], size)[rank]
        keys = [(sends["group"], sends["sends"], source) for source in range(size) if shares[source]]
        if not all(key in self.sent for key in keys):
            return False
        every = zip(*(self.sent[key] for key in keys), strict=True)
        weights = [shares[source] for *_, source in keys]
        worker.average(
            [sum(share * x for share, x in zip(weights, own, strict=True)) for own in every], outer=self.outer
        )
        return True

    def take_mean(self, worker: Worker, key: tuple[int, int]) -> bool:
        """Take the mean of anchors and momenta, once all are there. This worker's weights are where its anchor is."""
        if set(self.met[key]) != self.groups[key]:
            return False
        every = list(self.met[key].values())
        for param, *values in zip(worker.anchor.parameters(), *(params for params, _ in every), strict=True):
            param.data.copy_(sum(values) / len(values))
        if self.outer and every[0][1]:
            for param, *values in zip(worker.anchor.parameters(), *(own for _, own in every), strict=True):
                worker.outer.state[param]["momentum_buffer"] = sum(values) / len(values)
        worker.begin_at_anchor()
        return True

    def begin(self, number: int, worker: Worker, line: dict) -> bool:
        """A newcomer takes the mean of those that were there, and the inner optimizer of one of them."""
        if number not in self.given or not self.take_mean(worker, (line["group"], line["rounds"])):
            return False
        worker.inner = copy.deepcopy(self.given[number])
        return True
