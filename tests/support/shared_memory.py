"""Values, and what must be equal, for the tests of communicators whose rows travel through shared memory.

`own` is such a communicator, `comm` the one around which it was made.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import gossamer as gs
from gossamer.comm import Communicator
from tests.support.codec_cases import DTYPES


def sample(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    x[5::97] *= 1e-6
    return x.to(dtype)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def sums_have_the_same_bits(
    own: Communicator, comm: Communicator, codec: gs.Codec | None, sizes: Sequence[int]
) -> bool:
    """Whether two-shot sums through both have equal bits. Rows grow, shrink and grow: a call uses older memory."""
    same = []
    for call, numel in enumerate([*sizes, *sizes[::-1], 20_011]):
        for dtype in DTYPES:
            x, plain = (sample(comm.rank, numel, dtype) for _ in range(2))
            for group, tensor in ((own, x), (comm, plain)):
                gs.all_reduce(tensor, codec=codec, deterministic=True, op="mean", nonce=call, group=group)
            same.append(same_bits(x, plain))
    return all(same)


def errors_have_the_same_bits(own: Communicator, comm: Communicator) -> bool:
    """Whether four sums with error feedback through both leave equal results and errors."""
    codec, results = gs.ErrorFeedback(gs.Int4()), []
    for group in (own, comm):
        error = torch.zeros(5003)
        for step in range(4):
            x = sample(10 * step + comm.rank, 5003)
            gs.all_reduce(x, codec=codec, op="mean", error=error, group=group)
        results.append(torch.cat([x, error]))
    return same_bits(*results)
