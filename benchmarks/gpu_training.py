"""A training step of a GPT with 25 M parameters on ranks that share one GPU: against stock DDP, and DDP's fp16 hook.

For `bench_step.py --gpu`. All ranks are on the current GPU, so no figure is about links between GPUs. Stock DDP goes
over Gloo, because NCCL refuses ranks that share a GPU. Each of our paths is measured in a job of its own, beside both.
"""

import os
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import interleaved, paired, report_against, run_processes, slowest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as StockDDP

import gossamer as gs
from gossamer.bench.train import Wrap
from gossamer.workloads.gpt import GPT

SHAPE = {"context": 256, "width": 512, "heads": 8, "layers": 8}
QUICK = {"context": 16, "width": 32, "heads": 2, "layers": 2}
ROWS = 8  # of text per rank and step
DDP, FP16 = "stock DDP", "stock DDP, fp16 hook"
PATHS: dict[str, Callable[[], Any]] = {
    "Gloo": lambda: None,
    "symmetric memory": gs.Symmetric,
    "memory of the host": gs.HostMemory,
}
ALGORITHMS: dict[str, Callable[[], gs.Algorithm]] = {
    "gradient_allreduce": gs.GradientAllReduce,
    "deterministic": partial(gs.GradientAllReduce, deterministic=True),
    "bytegrad": gs.ByteGrad,
    "Int4 with feedback": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4())),
}
JUDGED = "bytegrad"  # against the fp16 hook
TARGET = 1.0  # times the fp16 hook's step
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Training:
    """A new GPT with AdamW on `device`, wrapped. A call makes one step and waits for its end."""

    def __init__(self, wrap: Wrap, shape: Mapping[str, int], device: torch.device) -> None:
        torch.manual_seed(0)
        network = GPT(**shape).to(device)
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
        self.model = wrap(network, self.optimizer)
        seeded = torch.Generator().manual_seed(dist.get_rank())
        self.text = torch.randint(256, (ROWS, shape["context"] + 1), generator=seeded).to(device)
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.text).backward()
        self.optimizer.step()
        self.wait()

    def gradient(self) -> torch.Tensor:
        return torch.cat([param.grad.flatten() for param in self.model.parameters()])


def with_fp16(network: nn.Module, _: object) -> nn.Module:
    model = StockDDP(network)
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def wraps(path: str) -> dict[str, Wrap]:
    found: dict[str, Wrap] = {DDP: lambda network, _: StockDDP(network), FP16: with_fp16}
    for name, algorithm in ALGORITHMS.items():
        found[name] = partial(gs.DataParallel, algorithm=algorithm(), process_group=PATHS[path]())
    return found


def worker(*, path: str, device: str, quick: bool) -> dict[str, list[float]]:
    """Milliseconds a step of each variant on the slowest rank, a figure for each turn."""
    shape = QUICK if quick else SHAPE
    bodies = {name: Training(wrap, shape, torch.device(device)) for name, wrap in wraps(path).items()}
    for body in bodies.values():
        body()
    exact = bodies[DDP].gradient()
    for name in ("gradient_allreduce", "deterministic", "bytegrad"):
        error = ((bodies[name].gradient() - exact).norm() / exact.norm()).item()
        if not error < 0.05:
            raise ArithmeticError(
                f"{name} over {path} must have DDP's gradient, got a relative error of {error}"
            )
    rounds, repeats = (2, 1) if quick else (7, 3)
    turns = slowest(interleaved(bodies, rounds=rounds, repeats=repeats, before=dist.barrier))
    return {name: [1e3 * s for s in each] for name, each in turns.items()}


def show(times: dict[str, list[float]], where: str, path: str) -> None:
    for name, each in times.items():
        for peer in (DDP, FP16):
            if name in (DDP, peer):
                continue
            report_against(
                f"step of a GPT, {where}, {name}{'' if name == FP16 else f' over {path}'}",
                each,
                "ms",
                (peer, times[peer]),
                paired(each, times[peer]),
                at_most=TARGET if (name, peer) == (JUDGED, FP16) else None,
            )


def measure(*, quick: bool, size: int = 2) -> None:
    """Measures every path and prints the results. Raises at the end if a path failed."""
    os.environ[OVERLAPPING] = "1"  # of the ranks, which share a device
    failed = []
    for path in PATHS:
        try:
            times = run_processes(size, {"path": path, "device": "cuda:0", "quick": quick})
        except Exception:
            traceback.print_exc()
            failed.append(path)
        else:
            show(times, f"{size} ranks on one {torch.cuda.get_device_name()}", path)
    if failed:
        raise RuntimeError(f"these paths failed: {', '.join(failed)}")
