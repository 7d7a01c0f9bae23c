"""A plain training loop under gs.elastic, and its replay in one process from the journals of all workers.

Arguments: a folder for the journals, the number of epochs, and a plan in JSON. Each worker writes lines of JSON to a
journal of its own. Entries of the plan:

    kill     {number of worker: [step, moment]}; the moment is "forward", "backward" (with half of the gradients there),
             "after" (the backward), "clipped" (before the optimizer's step) or "stepped" (after it)
    term     {number of worker: step}: the worker sends itself SIGTERM
    hang     the same with SIGSTOP
    nap      {number of worker: [step, seconds]}: the worker sleeps so long after the backward
    deadline the arguments of gs.elastic for one
    donors   numbers of workers that kill themselves while they save their state for a newcomer in their group
    givers   numbers of workers that kill themselves when they have begun to give it to one that is not in their group
    patient  numbers of workers: a newcomer takes the state once each of them has ended a step after it was given, and
             nobody gives a copy up, however late it is
    enters   {number of worker: group}: the worker kills itself when it enters that group, before newcomers are welcome
    clamps   true: after each step of its optimizer each worker limits its weights
    codec    "int8", with error feedback, or "sparse"
    rank     of gs.PowerSGD, by which the ranks train then
    task     "text" for a GPT on text instead of a small network on numbers; "saved" then has the validation loss
    local    the arguments of gs.LocalSGD, by which the ranks train then, with "outer": true for DiLoCo's outer
             optimizer. elastic_averages.py replays such runs, and elastic_peers.py those with a topology
    rounds   the arguments of gs.AsyncModelAverage, by which the ranks train then
    adam     "qadam", "onebit_adam" or "zero_one_adam", by which the ranks train then, with exact codecs if "codec" is
             "exact"
    sharded  the arguments of gs.Sharded, by which the ranks train then; with "codec" its gather_codec is Int8 too
    clip     the norm to which gradients are clipped
    misses   {number of worker: step}: the last message in which the ranks average momenta fails on that worker
    peers    the arguments of gs.Decentralized, or with "low": true those of gs.LowPrecisionDecentralized
    slow     {number of worker: how many times longer its steps are}
    counts   true: each worker counts 1 + its number as the samples of a step
    device   of the model, such as "cuda"; by default the CPU
    group    "HostMemory", "Symmetric" or "Flat": how sums travel
    backend, and sleep_s for each step
"""

import json
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, FEATURES = 240, 4, 6
WARMUP_STEPS = 5
BETAS = (0.9, 0.99999)  # with a variance that is frozen they allow moves that no element makes


class Numbers(Dataset):
    """Item i is (i, inputs, target)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.inputs[index], self.inputs[index].sin().sum().view(1)


def build(seed: int, adam: str | None = None, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer: that of the algorithm `adam`, or torch's Adam, perhaps "sharded"."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    model = model.to(torch.float64).to(device)
    if adam == "zero_one_adam":
        from gossamer.algorithms import ZeroOneAdamOptimizer

        return model, ZeroOneAdamOptimizer(
            model.parameters(), 0.01, WARMUP_STEPS, variance_scaler=2, betas=BETAS
        )
    if adam == "sharded":
        from gossamer.algorithms import ShardedOptimizer

        return model, ShardedOptimizer(torch.optim.Adam, model.parameters(), lr=0.01)
    if adam:
        from gossamer.algorithms import QAdamOptimizer

        return model, QAdamOptimizer(model.parameters(), 0.01, WARMUP_STEPS, betas=BETAS)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


class Text(Dataset):
    """Item i is (i, 33 bytes of source text)."""

    def __init__(self) -> None:
        from gossamer.workloads import source_text

        self.text, _ = source_text.standard_library()

    def __len__(self) -> int:
        return 1 << 18

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        at = index * 7919 % (len(self.text) - 33)
        return index, self.text[at : at + 33].long()


def workload(
    plan: dict[str, Any], seed: int
) -> tuple[nn.Module, torch.optim.Optimizer, Dataset, nn.Module | None]:
    """Return a model, its optimizer, its data, and a module for its loss on validation data, if it has any."""
    if plan.get("task") != "text":
        adam = "sharded" if "sharded" in plan else plan.get("adam")
        return *build(seed, adam, plan.get("device", "cpu")), Numbers(), None
    import tasks

    task = tasks.text()
    torch.manual_seed(seed)
    model = task.model().to(plan.get("device", "cpu"))

    class Validation(nn.Module):
        @torch.no_grad()
        def forward(self) -> float:
            return model(*task.validation).item()

    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), Text(), Validation()


def loss_in(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch of either data set, without its indices."""
    if len(batch) == 1:
        return model(*batch)  # the GPT's output is its loss
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


class Decay(torch.optim.lr_scheduler.StepLR):
    """StepLR in whose place a worker dies that saves its state."""

    dies = False

    def state_dict(self) -> dict[str, Any]:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict()


class Noted(logging.Handler):
    """Notes to which workers this one gives its state: before they are in its group, or then.

    Args:
        dies: whether this worker kills itself when it has begun to give.
    """

    def __init__(self, note: Callable[..., None], *, dies: bool) -> None:
        super().__init__()
        self._note, self._dies = note, dies

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("elastic: gives"):
            self._note(gives=record.args[0])
            if self._dies:
                os.kill(os.getpid(), signal.SIGKILL)
        elif record.msg.startswith("elastic: workers"):
            new, how = record.args
            self._note(new=new, copied="while" in how)


def be_patient(folder: Path, worker: int, others: Iterable[int]) -> None:
    """Make a copy independent of how fast this machine is: see "patient" in the plan."""
    from gossamer.regroup import donor, newcomer

    find_giver = newcomer.giver_in

    def giver_once_others_step(store: Any) -> int | None:
        lines = journals(folder)
        given = [line["time"] for own in lines.values() for line in own if line.get("gives") == worker]
        steps = {other: [line["time"] for line in lines[other] if "step" in line] for other in others}
        trained_on = given and all(max(times) > given[0] for times in steps.values())
        return find_giver(store) if trained_on else None

    newcomer.giver_in, donor._MOST_MISSED = giver_once_others_step, sys.maxsize


def main() -> None:
    folder, epochs, plan = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    worker = int(os.environ["GOSSAMER_ELASTIC_WORKER"])
    journal = open(folder / f"{worker}.jsonl", "a", buffering=1)  # noqa: SIM115

    def note(**line: Any) -> None:
        journal.write(json.dumps(line | {"time": time.time()}) + "\n")

    os.environ["GOSSAMER_LOG_LEVEL"] = "info"
    logging.getLogger("gossamer").addHandler(Noted(note, dies=worker in plan.get("givers", ())))
    import gossamer as gs
    from gossamer.engine.agree import checksum_of
    from gossamer.membership import member

    if others := plan.get("patient"):
        be_patient(folder, worker, others)

    def rounds() -> int:
        return getattr(algorithm, "rounds", 0)

    def place() -> dict[str, int]:
        seat = member().seat
        return {"group": seat.epoch, "rank": seat.placement.rank}

    kill_at, moment = plan.get("kill", {}).get(str(worker), (None, ""))
    gs.init(plan.get("backend"))
    inner, optimizer, data, validation = workload(plan, worker + 1)
    device = plan.get("device", "cpu")
    codecs = {"int8": gs.ErrorFeedback(gs.Int8()), "sparse": gs.ChunkTopK(chunk=128, k=8)}
    codec = (codecs | {"exact": gs.Identity(), None: None})[plan.get("codec")]
    algorithm: gs.Algorithm = gs.GradientAllReduce(codec=codec)
    if local := plan.get("local"):
        from elastic_averages import NotedLocalSGD
        from elastic_peers import NotedPeers

        algorithm = (
            NotedPeers(note, place, **local)
            if "topology" in local
            else NotedLocalSGD(note, codec=codec, **local)
        )
    if rank := plan.get("rank"):
        algorithm = gs.PowerSGD(rank, min_compression_rate=1.0)
    if asynchronous := plan.get("rounds"):
        from elastic_averages import NotedAsync

        algorithm = NotedAsync(lambda **line: note(**line, **place()), **asynchronous)
    if adam := plan.get("adam"):
        kinds = {"qadam": gs.QAdam, "onebit_adam": gs.OneBitAdam, "zero_one_adam": gs.ZeroOneAdam}
        algorithm = kinds[adam](codec)
    if (peers := plan.get("peers")) is not None:
        kind = gs.LowPrecisionDecentralized if peers.pop("low", False) else gs.Decentralized
        algorithm = kind(**peers)
    if (shares := plan.get("sharded")) is not None:
        codec = gs.Int8() if codec else None
        algorithm = gs.Sharded(codec, codec, **shares)
    after_consensus = type(algorithm).after_consensus

    def noted_consensus(*args: Any) -> None:
        after_consensus(*args)
        note(consensus=checksum_of(inner.parameters()), pid=os.getpid(), **place())

    if peers is not None:
        type(algorithm).after_consensus = noted_consensus
    connect, last_group = type(algorithm).connect, plan.get("enters", {}).get(str(worker))

    def connect_or_die(*args: Any) -> None:
        if member().seat is not None and place()["group"] == last_group:
            os.kill(os.getpid(), signal.SIGKILL)
        connect(*args)

    type(algorithm).connect = connect_or_die
    group = getattr(gs, plan["group"])() if "group" in plan else None
    sizes = {"bucket_bytes": 600, "first_bucket_bytes": 200}
    model = gs.DataParallel(inner, optimizer, algorithm=algorithm, process_group=group, **sizes)
    if worker == 0 and not any(folder.glob("start.pt")):
        torch.save({name: value.cpu() for name, value in inner.state_dict().items()}, folder / "start.pt")
    loader = DataLoader(data, BATCH, sampler=gs.ElasticSampler(data))
    scheduler = Decay(optimizer, 20, 1.0 if validation else 0.9)
    apart = bool(asynchronous or peers is not None or (local and "topology" in local))

    def ends_alone() -> bool:
        return algorithm.alone or getattr(run._survivor, "_failed_in_step", False)

    def stop() -> None:
        if local and apart:
            model.consensus()
        final = checksum_of(inner.parameters())
        note(saved=run.step, rounds=rounds(), final=final, validation=validation and validation())

    run = gs.elastic(
        loader,
        model,
        optimizer,
        scheduler=scheduler,
        on_stop=stop,
        total=0,
        **plan.get("deadline", {}),
    )
    Decay.dies = worker in plan.get("donors", ())  # the first group has saved by now
    note(begin=run.step, total=run.total, pid=os.getpid(), rounds=rounds(), **place())
    clip = plan.get("clip")
    slowness = plan.get("slow", {}).get(str(worker), 1)
    nap = plan.get("nap", {}).get(str(worker))
    now = -1

    def die_in_backward(_: torch.Tensor) -> None:
        if now == kill_at and moment == "backward":
            os.kill(os.getpid(), signal.SIGKILL)

    list(inner.parameters())[2].register_hook(die_in_backward)
    reduce_field, missed = type(algorithm).reduce_field, plan.get("misses", {}).get(str(worker))

    def reduce_and_miss(algorithm: gs.Algorithm, bucket: Any, *args: Any, **settings: Any) -> None:
        reduce_field(algorithm, bucket, *args, **settings)
        if now == missed and bucket.names == model.engine.buckets[-1].names:
            raise gs.CommError("the last message is missed, as planned")

    if missed is not None:
        type(algorithm).reduce_field = reduce_and_miss
    for epoch in run.epochs(epochs):
        for indices, *batch in run:
            now = run.step
            note(draw=now, epoch=epoch, indices=indices.tolist(), rounds=rounds(), **place())
            if now == kill_at and moment == "forward":
                os.kill(os.getpid(), signal.SIGKILL)
            for what, number in (("term", signal.SIGTERM), ("hang", signal.SIGSTOP)):
                if plan.get(what, {}).get(str(worker)) == now:
                    os.kill(os.getpid(), number)
            if plan.get("counts"):
                model.count(1 + worker)
            optimizer.zero_grad()
            loss = loss_in(model, *(each.to(device) for each in batch))
            loss.backward()
            size = model.links.control.size
            if nap and nap[0] == now:
                time.sleep(nap[1])
                nap = None
            if now == kill_at and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            if clip and shares is not None:
                optimizer.clip_grad_norm_(clip)
            elif clip:
                nn.utils.clip_grad_norm_(inner.parameters(), clip)
            if now == kill_at and moment == "clipped":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            if now == kill_at and moment == "stepped":
                os.kill(os.getpid(), signal.SIGKILL)
            if plan.get("clamps"):
                for param in inner.parameters():
                    param.data.clamp_(-0.3, 0.3)
            scheduler.step()
            run.total += 1
            note(
                step=now,
                group=place()["group"],
                ended=run.step,
                size=size,
                loss=loss.item(),
                # By gs.Sharded weights are whole at the next boundary, and no gradient is missing.
                alone=shares is None and ends_alone(),
                whole=not ends_alone(),
                bits=checksum_of(inner.parameters()),
            )
            time.sleep(slowness * plan.get("sleep_s", 0))
    if apart:
        model.consensus()
    note(end=run.step, total=run.total, rounds=rounds(), final=checksum_of(inner.parameters()))
    gs.shutdown()


def journals(folder: Path) -> dict[int, list[dict]]:
    """The lines of each worker, by its number. A line that a kill has cut off is left out."""
    return {
        int(file.stem): [json.loads(line) for line in file.read_text().split("\n")[:-1]]
        for file in folder.glob("*.jsonl")
    }


class Run:
    """What all workers have written, by step.

    Args:
        lines: the lines of each worker, by its number.
    """

    def __init__(self, lines: dict[int, list[dict]]) -> None:
        self.draws: dict[int, dict[int, list[int]]] = defaultdict(dict)  # by step and worker
        self.ended: dict[int, dict[int, dict]] = defaultdict(dict)
        self._last_draw: dict[int, float] = defaultdict(lambda: -1)
        for worker, own in lines.items():
            for line in own:
                if "draw" in line:
                    self.draws[line["draw"]][worker] = line["indices"]
                    self._last_draw[worker] = max(self._last_draw[worker], line["draw"])
                if "step" in line:
                    self.ended[line["step"]][worker] = line
                if "end" in line or "saved" in line:
                    self._last_draw[worker] = float("inf")

    def contributions(self, step: int) -> list[list[int]]:
        """The batches whose gradients were in the mean of a step, in any order."""
        draws, ended = self.draws[step], self.ended[step]
        if all(line["alone"] for line in ended.values()):
            return [draws[worker] for worker in sorted(ended)]
        went_on = {worker for worker in ended if self._last_draw[worker] > step} or set(ended)
        size = max(ended[worker]["size"] for worker in went_on)
        members = set(draws) if len(draws) == size else went_on
        if len(members) < size:  # a worker that left at this boundary, as it was told
            members = set(ended)
        assert len(members) == size, (step, size, sorted(draws), sorted(ended), sorted(went_on))
        return [draws[worker] for worker in sorted(members)]


def check(
    folder: Path,
    *,
    exact: bool = True,
    adam: str | None = None,
    apart: bool = False,
    clip: float | None = None,
) -> dict[str, float]:
    """Replay the run in one process, if it is exact. Return the steps and the worst relative deviation of a loss.

    Args:
        adam: see build().
        apart: the ranks hold different weights, but for those that they have averaged in a new group.
        clip: see the plan.
    """
    lines = journals(folder)
    for own in lines.values():
        steps = [line["step"] for line in own if "step" in line]
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True, steps
    run = Run(lines)
    assert sorted(run.ended) == list(range(len(run.ended))), "a step is missing"
    alone = 0
    for step, of_step in run.ended.items():
        assert all(line["ended"] == step + 1 for line in of_step.values()), f"lost or doubled: {of_step}"
        differ = len({line["bits"] for line in of_step.values()}) > 1
        own = any(line["alone"] for line in of_step.values())
        whole = all(line["whole"] for line in of_step.values())
        assert apart or not whole or not differ, f"step {step}: the ranks differ"
        alone += own
    groups = {line["group"] for own in lines.values() for line in own if "group" in line}
    assert alone <= 2 * len(groups), f"{alone} steps alone in {len(groups)} groups"
    means: dict[tuple[int, int], set[int]] = defaultdict(set)  # by group, and which one in that group
    for own_lines in lines.values():
        so_far: dict[int, int] = defaultdict(int)
        for line in (line for line in own_lines if "consensus" in line):
            means[line["group"], so_far[line["group"]]].add(line["consensus"])
            so_far[line["group"]] += 1
    assert all(len(bits) == 1 for bits in means.values()), f"means differ between ranks: {means}"
    assert bool(means) == apart
    inner, optimizer = build(0, adam)
    inner.load_state_dict(torch.load(folder / "start.pt"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    data, worst = Numbers(), 0.0
    for step in range(len(run.ended) if exact else 0):
        losses = [loss_of(inner, data, part) for part in run.contributions(step)]
        for worker, line in run.ended[step].items():
            replayed = loss_of(inner, data, run.draws[step][worker]).item()
            worst = max(worst, abs(line["loss"] / replayed - 1))
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        if clip:
            nn.utils.clip_grad_norm_(inner.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return {"steps": len(run.ended), "worst": worst}


def loss_of(model: nn.Module, data: Numbers, indices: Iterable[int]) -> torch.Tensor:
    items = [data[index] for index in indices]
    inputs, targets = (torch.stack([item[i] for item in items]) for i in (1, 2))
    return nn.functional.mse_loss(model(inputs), targets)


if __name__ == "__main__":
    main()
