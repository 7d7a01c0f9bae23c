"""The time of an optimizer step over many small tensors: fuse_step() against step(), and against torch's own ways.

300 float32 tensors of 256 elements, every other one [16, 16], each with a gradient, on one thread; all variants in
turns. "gradients apart" is how backward leaves them. "in a row" is flat memory, such as that of one bucket, where
nothing is copied. Ratios are medians over the turns. torch's fused=True is no target: its bits depend on where a
tensor ends.
"""

from collections.abc import Callable
from typing import Any

import torch
from harness import arguments, interleaved, paired, report_against
from torch import nn, optim

from gossamer.bagua.torch_api.contrib import fuse_optimizer

TENSORS, NUMEL = 300, 256
AT_MOST: dict[str, float] = {"SGD": 1.0, "SGD with momentum": 0.6, "Adam": 0.3}  # of the time of step()
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, {}),
    "SGD with momentum": (optim.SGD, {"momentum": 0.9}),
    "Adam": (optim.Adam, {}),
}


def step_of(kind: str, *, fuse: bool = False, in_a_row: bool = False, **options: Any) -> Callable[[], object]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn((NUMEL,) if odd % 2 else (16, 16))) for odd in range(TENSORS)]
    gradients = torch.randn(TENSORS, NUMEL)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = (gradient if in_a_row else gradient.clone()).view(param.shape)
    make, defaults = KINDS[kind]
    optimizer = make(params, lr=1e-4, **defaults, **options)
    if not fuse:
        return optimizer.step
    return fuse_optimizer(optimizer).fuse_step  # type: ignore[attr-defined]


def bench(kind: str, quick: bool) -> None:
    plain, fused = "step()", "fuse_step(), gradients apart"
    bodies = {
        plain: step_of(kind),
        fused: step_of(kind, fuse=True),
        "fuse_step(), gradients in a row": step_of(kind, fuse=True, in_a_row=True),
        "step(), foreach=True": step_of(kind, foreach=True),
        "step(), fused=True": step_of(kind, fused=True),
    }
    turns = interleaved(bodies, rounds=3 if quick else 21, repeats=2 if quick else 10)
    micros = {name: [1e6 * s for s in each.seconds] for name, each in turns.items()}
    for name in bodies:
        if name == plain:
            continue
        ratios = paired(micros[name], micros[plain])
        report_against(
            f"{kind}, {TENSORS} tensors of {NUMEL}: {name}",
            micros[name],
            "us",
            (plain, micros[plain]),
            ratios,
            at_most=AT_MOST[kind] if name == fused else None,
            quartiles=True,
        )


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    for kind in KINDS:
        bench(kind, options.quick)


if __name__ == "__main__":
    main()
