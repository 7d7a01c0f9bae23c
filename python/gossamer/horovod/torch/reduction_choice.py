# What the ranks tell each other before an optimizer's first reduction: whether they were asked for the same, and who
# has sparse gradients. By negotiated operations; which way follows from it is decided in reduction.py.
"""``Choice``."""

import hashlib
import itertools

import torch

from gossamer.errors import ConfigError
from gossamer.horovod.torch import asynchronous
from gossamer.horovod.torch.compression import describe
from gossamer.horovod.torch.handles import synchronize
from gossamer.horovod.torch.objects import allgather_object
from gossamer.horovod.torch.optimizer_arguments import Request
from gossamer.horovod.torch.submission import Max, Sum


class Choice:
    """Of one request. ``number``: the optimizer's, the same on all ranks."""

    def __init__(self, request: Request, number: int) -> None:
        self._request, self._number = request, number

    def compare(self, refusal: str, *, sparse: bool) -> tuple[bool, bool]:
        """Whether every rank is in its step, and whether one has a sparse gradient. ConfigError if requests differ."""
        lines = [*_describe(self._request), f"engine refused: {refusal or 'no'}"]
        digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "little")
        native = self._request.process_set.native()
        # By a sum, because a rank in join() adds zeros to it, and answers nothing else.
        table = torch.zeros(native.size, 3, dtype=torch.int64)
        table[native.rank] = torch.tensor([1, digest, int(sparse)])
        table = self._reduced(table, Sum, "request")
        present = table[table[:, 0] == 1]
        if len(set(present[:, 1].tolist())) > 1:
            raise ConfigError(
                f"hvd.DistributedOptimizer: {self._difference(lines, all_here=len(present) == native.size)}"
            )
        return len(present) == native.size, bool(present[:, 2].any())

    def _difference(self, lines: list[str], *, all_here: bool) -> str:
        what = "parameters and arguments must be equal on all ranks"
        if not all_here:
            return what
        every = allgather_object(lines, name=f"{self._name('lines')}", process_set=self._request.process_set)
        ranks = self._request.process_set.ranks
        assert ranks is not None
        for rank, other in zip(ranks, every, strict=True):
            for ours, theirs in itertools.zip_longest(every[0], other, fillvalue="nothing"):
                if ours != theirs:
                    return f"{what}, got {ours!r} on rank {ranks[0]} and {theirs!r} on rank {rank}"
        return what

    def agree_on_sparse(self, dims: list[int]) -> dict[int, int]:
        """Sparse dimensions of the gradients that are sparse on some rank, by index."""
        agreed = self._reduced(torch.tensor(dims), Max, "sparse").tolist()
        return {index: count for index, count in enumerate(agreed) if count}

    def _reduced(self, table: torch.Tensor, op: int, what: str) -> torch.Tensor:
        on_device = table.to(self._request.params[0].device) if self._request.params else table
        handle = asynchronous.allreduce_async(
            on_device, name=self._name(what), op=op, process_set=self._request.process_set
        )
        return torch.as_tensor(synchronize(handle)).cpu()

    def _name(self, what: str) -> str:
        return f"gossamer.DistributedOptimizer.{self._number}.{what}"


def _describe(request: Request) -> list[str]:
    """A line for each thing that must be equal on all ranks."""
    settings = (
        f"op {request.op}, gradient_predivide_factor {request.predivide}, compression {describe(request.compression)}, "
        f"sparse_as_dense {request.sparse_as_dense}, groups {request.groups}, ranks {request.process_set.ranks}"
    )
    params = enumerate(zip(request.names, request.params, strict=True))
    return [
        settings,
        *(
            f"parameter {name} {list(param.shape)} {param.dtype} on {param.device.type}"
            f"{'' if index in request.trained else ', frozen'}"
            for index, (name, param) in params
        ),
    ]
