"""Payload bytes that a rank sends per step, counted by model.engine.bytes_sent, for every algorithm and codec.

A model of large matrices, 4 ranks as threads over Gloo; beside each count the formula of docs/algorithms.md without
padding and agreement, both as a share of the ring's 2 (n-1)/n x 4 N. Counted over whole periods, after a first one;
the mean of the ranks. No time is measured.
"""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from harness import arguments, report, run_threads
from torch import nn

import gossamer as gs
from gossamer.topology import TOPOLOGIES

RANKS, PERIOD, BUCKET_BYTES = 4, 8, 1 << 19
WIDTHS, QUICK_WIDTHS = (512, 1024, 1024, 512), (256, 512, 256)
RING = 2 * (RANKS - 1) / RANKS  # times a tensor's bytes; also what the two-shot sends
INT4 = gs.ErrorFeedback(gs.Int4())
BITS = {gs.Int8(): 8 + 16 / 64, gs.Int4(): 4 + 16 / 32, gs.OneBit(): 1 + 16 / 128, gs.TopK(0.01): 64 * 0.01}
BITS |= {gs.MinMaxUInt8(): 8, gs.BF16(): 16, gs.FP16(): 16}


@dataclass(frozen=True)
class Case:
    """`words`: what a rank sends a step, in float32 elements, for a model with N elements in `shapes`."""

    name: str
    algorithm: Callable[[], gs.Algorithm]
    words: Callable[[int, list[torch.Size]], float]
    at_most: float | None = None


def of_ring(share: float) -> Callable[[int, list[torch.Size]], float]:
    return lambda numel, _shapes: share * RING * numel


def of_messages(count: float, bits: float = 32) -> Callable[[int, list[torch.Size]], float]:
    return lambda numel, _shapes: count * bits / 32 * numel


def of_factors(rank: int) -> Callable[[int, list[torch.Size]], float]:
    def words(_numel: int, shapes: list[torch.Size]) -> float:
        return RING * sum(rank * sum(shape) if len(shape) > 1 else shape.numel() for shape in shapes)

    return words


def codec_cases() -> list[Case]:
    """Every codec, with error feedback if it needs that; error feedback adds no bytes."""
    cases = []
    for codec, bits in BITS.items():
        forgets = isinstance(codec, (gs.Int4, gs.OneBit, gs.TopK))
        wrapped = gs.ErrorFeedback(codec) if forgets else codec
        at_most = {"Int4": 0.145, "OneBit": 0.04}.get(type(codec).__name__)
        name = f"gradient_allreduce, {type(codec).__name__}{' + EF' if forgets else ''}"
        make = partial(gs.GradientAllReduce, codec=wrapped)
        cases.append(Case(name, make, of_ring(bits / 32), at_most))
    return cases


def gossip_cases() -> list[Case]:
    """A message is a whole model: one for every peer of a round."""
    cases = [Case("decentralized, all", gs.Decentralized, of_ring(1))]
    for name, topology in TOPOLOGIES.items():
        if not topology.uniform:
            rounds = range(topology().period(RANKS))
            sent = [len(topology().mixing(r, RANKS, rank).exchanges) for r in rounds for rank in range(RANKS)]
            peers = statistics.mean(sent)
            cases.append(Case(f"decentralized, {name}", partial(gs.Decentralized, name), of_messages(peers)))
    for codec in (gs.Int8(), gs.Int4()):
        make = partial(gs.LowPrecisionDecentralized, codec)
        name = f"low_precision_decentralized, ring, {type(codec).__name__}"
        cases.append(Case(name, make, of_messages(2, BITS[codec])))
    return cases


def local_cases() -> list[Case]:
    share = 1 / PERIOD
    diloco = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    streaming = partial(gs.LocalSGD, PERIOD, diloco, fragments=2, delay=1, merge=0.5, codec=INT4)
    int4_share = share * BITS[gs.Int4()] / 32
    # A synchronisation is a ring's bytes and nothing is sent between two; a hundredth is for padding.
    return [
        Case(f"LocalSGD({PERIOD})", partial(gs.LocalSGD, PERIOD), of_ring(share), 1.01 * share),
        Case(f"streaming DiLoCo({PERIOD}), Int4 + EF", streaming, of_ring(int4_share), 1.01 * int4_share),
    ]


def cases() -> list[Case]:
    adaptive = partial(gs.GradientAllReduce, codec=gs.Adaptive(INT4))
    # The first round begins with the first forward; no other begins within the run, so its bytes can be counted.
    one_round = partial(gs.AsyncModelAverage, sync_interval_ms=10**9)
    return [
        Case("gradient_allreduce", gs.GradientAllReduce, of_ring(1)),
        Case("gradient_allreduce, deterministic", partial(gs.GradientAllReduce, True), of_ring(1)),
        Case("bytegrad", gs.ByteGrad, of_ring(BITS[gs.Int8()] / 32)),
        *codec_cases(),
        Case("gradient_allreduce, Adaptive(Int4 + EF)", adaptive, of_ring(BITS[gs.Int4()] / 32)),
        Case("powersgd, rank 4", gs.PowerSGD, of_factors(4)),
        Case("qadam, Int8 + EF", gs.QAdam, of_ring(BITS[gs.Int8()] / 32)),
        *gossip_cases(),
        *local_cases(),
        Case("async, a round instead of a step", one_round, of_ring(1)),
    ]


def mlp(widths: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def counted(case: Case, start: nn.Module, steps: int) -> float:
    """Bytes per step after the first PERIOD, or bytes of AsyncModelAverage's one round; the mean over the ranks."""

    def body(comm: Any, _backend: Any) -> float:
        network = copy.deepcopy(start)
        params = list(network.parameters())
        qadam = case.algorithm is gs.QAdam
        kind = partial(gs.QAdamOptimizer, warmup_steps=1) if qadam else torch.optim.SGD
        optimizer = kind(params, lr=1e-4)
        buckets = {"bucket_bytes": BUCKET_BYTES, "first_bucket_bytes": BUCKET_BYTES}
        model = gs.DataParallel(network, optimizer, algorithm=case.algorithm(), process_group=comm, **buckets)
        rows = torch.randn(4, params[0].size(1), generator=torch.Generator().manual_seed(comm.rank))

        def train(count: int) -> int:
            for _ in range(count):
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()
            model.algorithm_state_dict()  # waits for the communication in the background
            return model.engine.bytes_sent

        if isinstance(model.algorithm, gs.AsyncModelAverage):
            train(1)
            model.close()  # waits for the round
            return model.algorithm.bytes_sent
        before = train(PERIOD)
        sent = (train(steps) - before) / steps
        model.close()
        return sent

    return statistics.mean(run_threads(RANKS, body))


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    start = mlp(QUICK_WIDTHS if options.quick else WIDTHS)
    shapes = [param.shape for param in start.parameters()]
    numel = sum(shape.numel() for shape in shapes)
    ring_bytes = RING * 4 * numel
    for case in cases():
        sent_bytes = counted(case, start, PERIOD if options.quick else 3 * PERIOD)
        formula_bytes = 4 * case.words(numel, shapes)
        report(
            f"bytes per step and rank, {case.name}, {RANKS} ranks, {numel} parameters",
            sent_bytes,
            "bytes",
            baseline=("ring float32 all-reduce", ring_bytes),
            at_most=case.at_most,
            target_of="ratio",
            formula_bytes=round(formula_bytes),
            formula_ratio=round(formula_bytes / ring_bytes, 5),
        )


if __name__ == "__main__":
    main()
