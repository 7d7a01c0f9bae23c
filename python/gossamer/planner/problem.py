# Nothing is allocated: parameters are tensors without memory. A made-up transformer stands for a bare number of
# parameters. Callers: planner/predict.py and the command.
"""What is trained: parameters, the compute of a step, and the engine's plan of buckets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import _C
from gossamer.algorithms import Algorithm
from gossamer.engine.plan import plan_buckets
from gossamer.errors import ConfigError
from gossamer.facts import PlannedBucket
from gossamer.planner.speeds import CPU, Speeds

_VOCABULARIES = (50257, 8192, 256)
_WIDTH_PER_LAYER, _WIDTH_STEP = 80, 64


@dataclass(frozen=True)
class Problem:
    """One training step on every rank.

    Args:
        parameters: the model's parameters, in its order. They need no memory.
        names: the parameters' names.
        compute_s: seconds of a step without any communication.
        forward: the share of `compute_s` that comes before the backward.
        bucket_bytes, first_bucket_bytes: see gossamer.DataParallel.
        speeds: the speeds of a rank's work besides sending.
        cores: processor cores that a rank has for computing and for the work of sending. Below 2, the two slow each
            other down.

    Raises:
        ConfigError: there are no parameters, or a number is out of its range.
    """

    parameters: tuple[Tensor, ...]
    names: tuple[str, ...]
    compute_s: float
    forward: float = 1 / 3
    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int = 1 << 20
    speeds: Speeds = field(default=CPU)
    cores: float = math.inf

    def __post_init__(self) -> None:
        if not self.parameters or len(self.parameters) != len(self.names):
            raise ConfigError(
                f"Problem: needs parameters and as many names, got {len(self.parameters)} and {len(self.names)}"
            )
        if not (0 <= self.compute_s < math.inf and 0 <= self.forward <= 1):
            raise ConfigError(
                f"Problem: compute_s must not be negative and forward be 0 to 1, got {self.compute_s!r} and "
                f"{self.forward!r}"
            )
        if min(self.bucket_bytes, self.first_bucket_bytes) < 1 or not self.cores > 0:
            raise ConfigError(
                f"Problem: bucket_bytes, first_bucket_bytes and cores must be above 0, got {self.bucket_bytes!r}, "
                f"{self.first_bucket_bytes!r} and {self.cores!r}"
            )

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def backward_s(self) -> float:
        return self.compute_s * (1 - self.forward)

    def with_compute(self, compute_s: float) -> "Problem":
        """The same problem where a step computes for that many seconds."""
        return replace(self, compute_s=compute_s)


def buckets_of(problem: Problem, algorithm: Algorithm | None = None, chunks: int = 1) -> list[PlannedBucket]:
    """Returns the engine's plan, with padding, for gradients that arrive from the last parameter to the first.

    A parameter's share of the backward is its share of the elements.

    Args:
        algorithm: the algorithm that the plan is for. None: torch DDP's plan, which has no padding.
        chunks: the number of chunks of the communicator.
    """
    order = range(len(problem.parameters) - 1, -1, -1)
    plan = plan_buckets(
        problem.parameters,
        order,
        bucket_bytes=problem.bucket_bytes,
        first_bucket_bytes=problem.first_bucket_bytes,
        group_of=lambda i: algorithm.group_of(problem.names[i], problem.parameters[i]) if algorithm else None,
        limit_of=lambda model_bytes: algorithm.bucket_limit(model_bytes) if algorithm else None,
    )
    until: dict[int, float] = {}
    seen = 0
    for index in order:
        seen += problem.parameters[index].numel()
        until[index] = seen / problem.numel

    def planned(indices: Sequence[int]) -> PlannedBucket:
        params = [problem.parameters[i] for i in indices]
        numel = sum(param.numel() for param in params)
        if algorithm is not None:
            comm: Any = SimpleNamespace(chunks=chunks, size=chunks)
            numel = _C.Placement.in_turn(params, algorithm.block(), algorithm.alignment(comm)).numel
        shapes = tuple(param.shape for param in params)
        return PlannedBucket(numel, params[0].dtype, tuple(indices), shapes, max(until[i] for i in indices))

    return [planned(indices) for indices in plan]


def of_module(module: nn.Module, compute_s: float, **settings: Any) -> Problem:
    """Returns the problem of a module's trainable parameters. `settings` are Problem's other arguments."""
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    meta = tuple(torch.empty(param.shape, dtype=param.dtype, device="meta") for _, param in named)
    return Problem(meta, tuple(name for name, _ in named), compute_s, **settings)


def transformer(
    count: int, compute_s: float, *, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Problem, str]:
    """Returns the problem of a GPT with `count` parameters and usual proportions, and a text that describes it."""
    layers, width, words = _proportions(count)
    shapes: list[tuple[str, tuple[int, ...]]] = [("embedding", (words, width))] if words else []
    for layer in range(layers):
        shapes += [(f"{layer}.{name}", shape) for name, shape in _block(width)]
    rest = count - sum(math.prod(shape) for _, shape in shapes)
    if rest:
        shapes.append(("rest", (rest,)))
    meta = tuple(torch.empty(shape, dtype=dtype, device="meta") for _, shape in shapes)
    problem = Problem(meta, tuple(name for name, _ in shapes), compute_s, **settings)
    return problem, f"a transformer of {layers} layers, {width} wide, with {words} words"


def _proportions(count: int) -> tuple[int, int, int]:
    """Returns layers, width and words of the largest GPT of at most `count` parameters. Words use up the rest."""
    best = (0, 1, 0)
    for vocabulary in _VOCABULARIES:
        layers = 1
        while True:
            width = max(1, round(_WIDTH_PER_LAYER * layers / _WIDTH_STEP)) * _WIDTH_STEP
            blocks = layers * sum(math.prod(shape) for _, shape in _block(width))
            if blocks + vocabulary * width > count:
                break
            best = (layers, width, (count - blocks) // width)
            layers += 1
        if best[0] >= 4 or (best[0] and vocabulary == _VOCABULARIES[-1]):
            break
    return best


def _block(width: int) -> list[tuple[str, tuple[int, ...]]]:
    weights: dict[str, tuple[int, ...]] = {
        "norm_1": (width,),
        "attention": (3 * width, width),
        "project": (width, width),
        "norm_2": (width,),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    return [
        shape
        for name, weight in weights.items()
        for shape in ((f"{name}.weight", weight), (f"{name}.bias", weight[:1]))
    ]
