"""``Choice``: what the ranks tell each other, by named operations, before an optimizer's first reduction.

They compare what they were asked for, and agree on which gradients are sparse. reduction.py decides by the result.
"""

import hashlib
import itertools

import torch

from gossamer.errors import ConfigError
from gossamer.horovod.torch.compression import describe
from gossamer.horovod.torch.objects import allgather_object
from gossamer.horovod.torch.operations.collectives import allreduce
from gossamer.horovod.torch.operations.submission import Max, Sum
from gossamer.horovod.torch.reduction.request import Request


class Choice:
    """The agreement on one request. ``number``: the optimizer's number, the same on all ranks."""

    def __init__(self, request: Request, number: int) -> None:
        self._request, self._number = request, number

    def compare(self, refusal: str, *, sparse: bool) -> tuple[bool, bool]:
        """Compares the ranks' requests.

        Args:
            refusal: why the engine cannot reduce this rank's gradients, or an empty string.
            sparse: whether this rank has a sparse gradient.

        Returns:
            Whether every rank is in its step, rather than in join(); and whether any rank has a sparse gradient.

        Raises:
            ConfigError: on every rank, if the requests differ.
        """
        lines = [*_describe(self._request), f"engine refused: {refusal or 'no'}"]
        digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "little")
        native = self._request.process_set.native()
        # A sum, because a rank in join() adds zeros to a sum and answers nothing else.
        table = torch.zeros(native.size, 3, dtype=torch.int64)
        table[native.rank] = torch.tensor([1, digest, int(sparse)])
        table = self._reduced(table, Sum, "request")
        present = table[table[:, 0] == 1]
        all_here = len(present) == native.size
        if len(set(present[:, 1].tolist())) > 1:
            raise ConfigError(f"hvd.DistributedOptimizer: {self._difference(lines, all_here=all_here)}")
        return all_here, bool(present[:, 2].any())

    def agree_on_sparse(self, dims: list[int]) -> dict[int, int]:
        """Returns the number of sparse dimensions of each gradient that is sparse on some rank, by index.

        Args:
            dims: this rank's numbers for all gradients; 0 for a dense one.
        """
        agreed = self._reduced(torch.tensor(dims), Max, "sparse").tolist()
        return {index: count for index, count in enumerate(agreed) if count}

    def _difference(self, lines: list[str], *, all_here: bool) -> str:
        what = "parameters and arguments must be equal on all ranks"
        if not all_here:
            return what
        every = allgather_object(lines, name=self._name("lines"), process_set=self._request.process_set)
        ranks = self._request.process_set.ranks
        assert ranks is not None
        for rank, other in zip(ranks, every, strict=True):
            for ours, theirs in itertools.zip_longest(every[0], other, fillvalue="nothing"):
                if ours != theirs:
                    return f"{what}, got {ours!r} on rank {ranks[0]} and {theirs!r} on rank {rank}"
        return what

    def _reduced(self, table: torch.Tensor, op: int, what: str) -> torch.Tensor:
        on_device = table.to(self._request.params[0].device) if self._request.params else table
        return allreduce(on_device, name=self._name(what), op=op, process_set=self._request.process_set).cpu()

    def _name(self, what: str) -> str:
        return f"gossamer.DistributedOptimizer.{self._number}.{what}"


def _describe(request: Request) -> list[str]:
    """Returns a line for each thing that must be equal on all ranks."""
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
