"""The time of an optimizer step: gs.optim against torch's foreach and fused forms, all in turns.

Two models of float32 parameters on one thread: a large one that no cache holds (4 Mi elements in 32 tensors), where
memory decides, and a small one (300 tensors of 256), where the calls do. "in a row": parameters and gradients lie in
flat memory, as with gs.DataParallel; torch's fused form gets the same tensors. "apart": each has memory of its own.
Ratios are medians over the turns. With --gpu: 64 Mi elements in 160 tensors, on the current CUDA device.
"""

from collections.abc import Callable
from typing import Any

import torch
from harness import arguments, interleaved, paired, report_against
from torch import nn

import gossamer as gs

LARGE, SMALL, GPU = (32, 1 << 17), (300, 256), (160, 409_600)  # tensors, elements of each
KINDS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}}
OURS, FOREACH, FUSED = "gs.optim", "torch foreach", "torch fused"


def step_of(
    kind: str, form: str, shape: tuple[int, int], *, in_a_row: bool, device: str
) -> Callable[[], object]:
    count, numel = shape
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.randn(count, numel, generator=generator, device=device)
    gradients = torch.randn(count, numel, generator=generator, device=device)
    params = []
    for weight, gradient in zip(weights, gradients, strict=True):
        param = nn.Parameter(weight if in_a_row else weight.clone())
        param.grad = gradient if in_a_row else gradient.clone()
        params.append(param)
    options = KINDS[kind] | {"lr": 1e-4}
    if form == OURS:
        return getattr(gs.optim, kind)(params, **options).step
    return getattr(torch.optim, kind)(params, **options, **{form.removeprefix("torch "): True}).step


def awaited(step: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        step()
        torch.cuda.synchronize()

    return run


def bench(kind: str, shape: tuple[int, int], *, in_a_row: bool, device: str, quick: bool) -> None:
    bodies = {
        form: step_of(kind, form, shape, in_a_row=in_a_row, device=device) for form in (OURS, FOREACH, FUSED)
    }
    if device == "cuda":
        bodies = {form: awaited(step) for form, step in bodies.items()}
    turns = interleaved(bodies, rounds=3 if quick else 21, repeats=2 if quick else 5)
    micros = {form: [1e6 * s for s in each.seconds] for form, each in turns.items()}
    for peer in (FOREACH, FUSED):
        ratios = paired(micros[OURS], micros[peer])
        report_against(
            f"{kind}, {shape[0]} tensors of {shape[1]} {'in a row' if in_a_row else 'apart'}, {device}: against {peer}",
            micros[OURS],
            "us",
            (peer, micros[peer]),
            ratios,
            at_most=1.0,
            quartiles=True,
        )


def main() -> None:
    options = arguments(__doc__, gpu="on the current CUDA device")
    torch.set_num_threads(1)
    device = "cuda" if options.gpu else "cpu"
    for kind in KINDS:
        for shape in (GPU, SMALL) if options.gpu else (LARGE, SMALL):
            for in_a_row in (True, False):
                bench(kind, shape, in_a_row=in_a_row, device=device, quick=options.quick)


if __name__ == "__main__":
    main()
