"""Whether bits depend on the bucket size: the same gradients reduced in buckets of 1 MiB and of 200 kB.

Three ways, ranks as threads over Gloo: the deterministic all-reduce and the group's own, both through
gs.DataParallel on a module with the demo GPT's parameters; and torch's Gloo backend called directly on
slices of the joined gradient, with no Gossamer code in between.
"""

from typing import Any

import torch
from harness import arguments, report, run_threads
from torch import nn

import gossamer as gs
from gossamer.workloads.gpt import GPT

BUCKET_BYTES = (1 << 20, 200_000)


class FixedGradient(nn.Module):
    """Parameters of the GPT's shapes whose gradient is, bit for bit, normal noise drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        shapes = [param.shape for param in GPT().parameters()]
        self.params = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.gradients = [torch.randn(shape, generator=random) for shape in shapes]

    def forward(self) -> torch.Tensor:
        products = [(p * g).sum() for p, g in zip(self.params, self.gradients, strict=True)]
        return torch.stack(products).sum()


def through_engine(comm: Any, deterministic: bool, bucket_bytes: int) -> torch.Tensor:
    """The averaged gradient [numel] after the second step, when the buckets follow the order of arrival."""
    module = FixedGradient(seed=comm.rank)
    algorithm = gs.GradientAllReduce(deterministic=deterministic)
    size = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": bucket_bytes}
    model = gs.DataParallel(module, algorithm=algorithm, process_group=comm, **size)
    for _ in range(2):
        module.zero_grad()
        model().backward()
    flat = torch.cat([param.grad.flatten() for param in module.params])
    model.close()
    return flat


def through_gloo(backend: Any, rank: int, bucket_bytes: int) -> torch.Tensor:
    flat = torch.cat([gradient.flatten() for gradient in FixedGradient(seed=rank).gradients])
    for part in flat.split(bucket_bytes // 4):
        backend.allreduce([part]).wait()
    return flat / backend.size()


def changed(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Percent of elements, and of bits, that differ."""
    difference = pair[0].view(torch.int32) ^ pair[1].view(torch.int32)
    bits = sum(((difference >> bit) & 1).sum().item() for bit in range(32))
    elements = difference.count_nonzero().item()
    return 100 * elements / difference.numel(), 100 * bits / (32 * difference.numel())


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    layouts = " and ".join(f"{size:,} B" for size in BUCKET_BYTES)
    for ranks in (3,) if options.quick else (3, 4):

        def body(comm: Any, backend: Any) -> list[tuple[torch.Tensor, ...]]:
            return [
                tuple(through_engine(comm, True, size) for size in BUCKET_BYTES),
                tuple(through_engine(comm, False, size) for size in BUCKET_BYTES),
                tuple(through_gloo(backend, comm.rank, size) for size in BUCKET_BYTES),
            ]

        everyone = run_threads(ranks, body)
        names = ["deterministic all-reduce", "the group's own all-reduce", "torch's Gloo backend"]
        shares = dict(zip(names, map(changed, everyone[0]), strict=True))
        stock = shares[names[2]][0]
        for position, (name, (elements, bits)) in enumerate(shares.items()):
            same = all(torch.equal(mine[position][0], everyone[0][position][0]) for mine in everyone)
            report(
                f"elements that change between buckets of {layouts}, {name}, n = {ranks}",
                elements,
                "%",
                baseline=("stock Gloo all-reduce", stock),
                at_most=0 if position == 0 else None,
                bits_changed_percent=round(bits, 4),
                equal_bits_across_ranks=same,
            )


if __name__ == "__main__":
    main()
