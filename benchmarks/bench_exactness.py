"""Whether data parallelism trains the same model: n ranks against one process on the same global batches.

SGD in float32 on the demo's GPT and text. Rank 0 also trains alone on the global batches, which is the
reference; stock DDP trains beside it. Figure: |weights - reference| / |reference|, L2, after the last step;
of_update is the same as a part of the way that the weights went.
"""

import json

import torch
import torch.distributed as dist
from harness import answer, arguments, report, run_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs
from gossamer.workloads import source_text
from gossamer.workloads.gpt import CONTEXT, GPT

ROWS, LEARNING_RATE = 12, 0.1  # rows of each global batch: divisible by 2, 3 and 4
TARGET = 1e-5


def trained(variant: str, text: torch.Tensor, steps: int) -> torch.Tensor:
    """The weights [numel] after `steps` of SGD on this rank's part of each batch; "one process" takes all of it."""
    torch.manual_seed(0)
    network = GPT()
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    model: nn.Module = network
    rank, size = gs.rank(), gs.size()
    if variant == "one process":
        rank, size = 0, 1
    elif variant == "stock DDP":
        model = DistributedDataParallel(network)
    else:
        algorithm = gs.GradientAllReduce(deterministic=variant == "deterministic")
        model = gs.DataParallel(network, optimizer, algorithm=algorithm)
    for step in range(steps):
        rows = source_text.batch(text, seed=step, rows=ROWS, context=CONTEXT)
        loss = model(rows.chunk(size)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(network.parameters()).detach()


def work(steps: int) -> None:
    """One rank: the differences of all variants, and whether their weights have equal bits on all ranks."""
    gs.init(backend="gloo")
    text, _ = source_text.standard_library()
    if gs.rank() == 0:  # the others wait for rank 0 in the next run
        start, reference = (trained("one process", text, count) for count in (0, steps))
    result = {}
    for variant in ("gradient_allreduce", "deterministic", "stock DDP"):
        weights = trained(variant, text, steps)
        dist.broadcast(first := weights.clone(), src=0)
        differing = (weights.view(torch.int32) != first.view(torch.int32)).sum()
        dist.all_reduce(differing)
        if gs.rank() == 0:
            apart, way = (weights - reference).double().norm(), (reference - start).double().norm()
            result[variant] = {"apart": (apart / reference.double().norm()).item()}
            result[variant] |= {"of_update": (apart / way).item(), "differing": int(differing)}
    answer(result)


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    if options.worker:
        work(**json.loads(options.worker))
        return
    steps = 5 if options.quick else 100
    for ranks in (2,) if options.quick else (2, 3, 4):
        seen = run_processes(ranks, {"steps": steps})
        for variant, figures in seen.items():
            report(
                f"weights after {steps} steps of SGD against one process, {variant}, n = {ranks}",
                figures["apart"],
                "relative L2",
                baseline=("stock DDP", seen["stock DDP"]["apart"]),
                at_most=None if variant == "stock DDP" else TARGET,
                of_update=float(f"{figures['of_update']:.3g}"),
            )
            report(
                f"weights with other bits than rank 0's after {steps} steps, {variant}, n = {ranks}",
                figures["differing"],
                "elements",
                baseline=("stock DDP", seen["stock DDP"]["differing"]),
                at_most=None if variant == "stock DDP" else 0,
            )


if __name__ == "__main__":
    main()
