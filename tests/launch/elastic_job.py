"""A training run for the elastic tests: the loss of every step is known in advance, whatever the number of workers.

Arguments: a folder for the journals, the number of steps, and a plan in JSON. Its entries: "kill" and "raise", each
{step: ranks that do so, once in the run}; "size": {step: number of workers that the run waits for there, at commits};
"sleep_s" for each step; "commit_every": steps between commits; "until": a file whose existence ends the run;
"distributed": train with hvd.DistributedOptimizer; "newcomer": [seconds, act]: the first worker that comes while
others train takes so long between init() and train(), and then goes on, or does this: "kill", "raise", "collective".
Each worker writes a line of JSON for each step to a journal of its own.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

SAMPLES = 12  # of a step, all workers together: divisible by 1, 2, 3 and 4
FEATURES = 5


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, inputs.sin().sum(1, keepdim=True)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(FEATURES, 1, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def reference(steps: int) -> list[float]:
    """The loss of each step with one worker."""
    model, optimizer = build()
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def journals(folder: Path) -> dict[int, list[dict]]:
    """The lines of each process, by its id. A line that a kill has cut off is left out."""
    found = {}
    for file in folder.glob("*.jsonl"):
        lines = file.read_text().split("\n")[:-1]
        found[int(file.stem)] = [json.loads(line) for line in lines]
    return found


def worst_deviation(folder: Path, steps: int) -> float:
    """The largest relative deviation of any worker's loss from the reference; all steps must have been made."""
    expected = reference(steps)
    lines = [line for journal in journals(folder).values() for line in journal if "step" in line]
    assert {line["step"] for line in lines} == set(range(steps))
    return max(abs(line["loss"] / expected[line["step"]] - 1) for line in lines)


def prepare(folder: Path, seconds: float, act: str) -> None:
    """Does what the plan says for the first newcomer between init() and train()."""
    import gossamer.horovod.torch as hvd

    try:
        (folder / "newcomer").touch(exist_ok=False)
    except FileExistsError:
        return
    time.sleep(seconds)
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "raise":
        raise KeyError("of a newcomer")
    if act == "collective":
        hvd.barrier()  # the counterpart of the others' callback, see main()


def main() -> None:
    import gossamer.horovod.torch as hvd
    from gossamer.membership import member

    folder, steps, plan = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    others_train = any("step" in line for lines in journals(folder).values() for line in lines)
    hvd.init()
    journal = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115

    def note(**line: object) -> None:
        place = {"rank": hvd.rank(), "size": hvd.size(), "local_size": hvd.local_size()}
        journal.write(json.dumps({**line, **place, "time": time.time()}) + "\n")

    def once(act: str, step: int) -> bool:
        if hvd.rank() not in plan.get(act, {}).get(str(step), ()):
            return False
        try:
            (folder / f"{act}{step}.{hvd.rank()}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def disturb(step: int) -> None:
        if once("raise", step):
            raise KeyError(f"of step {step}")
        if once("kill", step):
            os.kill(os.getpid(), signal.SIGKILL)
        while hvd.size() != plan.get("size", {}).get(str(step), hvd.size()):
            time.sleep(0.05)
            state.commit()
        time.sleep(plan.get("sleep_s", 0))

    def told_to_end() -> bool:
        return "until" in plan and hvd.broadcast_object(Path(plan["until"]).exists(), root_rank=0)

    model, optimizer = build()
    if plan.get("distributed"):
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    if plan.get("newcomer", ("", ""))[1] == "collective":
        state.register_reset_callbacks([hvd.barrier])

    if others_train and "newcomer" in plan:
        note(told=True)
        prepare(folder, *plan["newcomer"])
        note(prepared=True)

    @hvd.elastic.run
    def train(state) -> None:
        note(begin=state.step, resets=resets, group=member().seat.epoch)
        while state.step < steps and not told_to_end():
            disturb(state.step)
            inputs, targets = batch(state.step)
            part = slice(hvd.rank(), None, hvd.size())
            loss = torch.nn.functional.mse_loss(state.model(inputs[part]), targets[part])
            state.optimizer.zero_grad()
            loss.backward()
            if not plan.get("distributed"):
                hvd.grouped_allreduce_([p.grad for p in state.model.parameters()], op=hvd.Average)
            state.optimizer.step()
            note(step=state.step, loss=hvd.allreduce(loss.detach(), name="loss").item())
            state.step += 1
            if state.step % plan.get("commit_every", 3) == 0:
                state.commit()

    train(state)
    note(end=state.step)
    hvd.shutdown()


if __name__ == "__main__":
    main()
