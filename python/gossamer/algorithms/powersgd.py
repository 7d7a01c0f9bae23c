"""PowerSGD: gradients of matrices travel as two thin factors, with error feedback.

Vogels, Karimireddy, Jaggi: PowerSGD (2019), arXiv:1905.13727. Two all-reduces a bucket: one for the left factors and
what is not compressed, one for the right factors. Matrices of one shape are multiplied together.
"""

import zlib
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm
from gossamer.codec import accumulate_dtype
from gossamer.comm import Communicator
from gossamer.engine import Worker
from gossamer.errors import ConfigError


class PowerSGD(Algorithm):
    """g <- P (mean of Q)^T for every matrix, P and Q of `rank` columns; what that leaves out is sent later.

    With M = g + e: P = orthogonal(mean of M Q), Q = M^T P, e = M - P Q^T. Q is kept from step to step. A gradient of
    more than two dimensions is a matrix of its first dimension and the rest. One of fewer than two, or one whose
    factors would not save enough, is averaged as it is.

    Args:
        rank: columns of P and Q.
        start_step: average exactly for so many steps first, while gradients are of high rank.
        min_compression_rate: elements of a matrix over elements of its factors, at least.
    """

    name = "powersgd"
    state_fields = ("error",)
    needs_optimizer = True

    def __init__(self, rank: int = 4, *, start_step: int = 0, min_compression_rate: float = 2.0) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"PowerSGD: rank must be a positive integer, got {rank!r}")
        if not isinstance(start_step, int) or start_step < 0:
            raise ConfigError(f"PowerSGD: start_step must be a number of steps, got {start_step!r}")
        self.rank, self.start_step, self.min_compression_rate = rank, start_step, min_compression_rate

    def connect(self, worker: Worker) -> None:
        super().connect(worker)
        self._step = 0
        self._right: dict[str, Tensor] = {}  # Q by parameter name, [columns of M, rank]
        self._groups: dict[int, list[_Group]] = {}

    def setup(self, comm: Communicator, buckets: list[Any]) -> None:
        self._comm = comm
        self._groups = {}
        for bucket in buckets:
            groups: dict[tuple[int, int], _Group] = {}
            for position, param in enumerate(bucket.params):
                shape = param.size(0) if param.dim() else 1, param[0].numel() if param.dim() > 1 else 1
                columns = min(self.rank, *shape)
                if param.dim() > 1 and param.numel() >= self.min_compression_rate * columns * sum(shape) > 0:
                    groups.setdefault(shape, _Group(shape)).positions.append(position)
                    self._right.setdefault(
                        bucket.names[position], _start(bucket, position, shape[1], columns)
                    )
            self._groups[bucket.index] = list(groups.values())
            bucket.add_field("error", dtype=accumulate_dtype(bucket.dtype))

    def bucket_ready(self, bucket: Any) -> None:
        if self._comm.size == 1:
            return
        views = bucket.views()
        groups = self._groups[bucket.index] if self._step >= self.start_step else []
        compressed = {position for group in groups for position in group.positions}
        for group in groups:
            names = [bucket.names[position] for position in group.positions]
            group.load(views, bucket.views("error"), torch.stack([self._right[name] for name in names]))
        self._mean(
            [
                *(group.left for group in groups),
                *(view for position, view in enumerate(views) if position not in compressed),
            ]
        )
        for group in groups:
            group.multiply_back()
        self._mean([group.right for group in groups])
        for group in groups:
            group.store(views, bucket.views("error"))
            for position, right in zip(group.positions, group.right, strict=True):
                self._right[bucket.names[position]].copy_(right.nan_to_num(0.0, 0.0, 0.0))

    def _mean(self, tensors: list[Tensor]) -> None:
        """Their mean over the ranks, in place, by one all-reduce in float32 (float64)."""
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).to(accumulate_dtype(tensor.dtype)) for tensor in tensors])
        flat.mul_(1.0 / self._comm.size)
        self._comm.all_reduce(flat).wait()
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def after_step(self, step: int) -> None:
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "right": {name: right.clone() for name, right in self._right.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        for name, right in state["right"].items():
            self._right[name].copy_(right)


class _Group:
    """The k matrices [rows, columns] of one shape in a bucket, during its bucket_ready."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.positions: list[int] = []

    def load(self, views: list[Tensor], errors: list[Tensor], right: Tensor) -> None:
        """right: [k, columns, rank] of the step before."""
        self.matrices = self._stack(errors) + self._stack(views)
        self.left = torch.bmm(self.matrices, right)

    def multiply_back(self) -> None:
        """After the mean of `left`. QR copes with zeros and with columns that depend on each other."""
        self.left = torch.linalg.qr(self.left)[0]
        self.own = torch.bmm(self.matrices.mT, self.left)
        self.right = self.own.clone()

    def store(self, views: list[Tensor], errors: list[Tensor]) -> None:
        """After the mean of `right`."""
        mean = torch.bmm(self.left, self.right.mT)
        left_out = self.matrices.baddbmm_(self.left, self.own.mT, alpha=-1)
        left_out.nan_to_num_(
            0.0, 0.0, 0.0
        )  # a step that is skipped for its NaN must not poison the later ones
        for number, position in enumerate(self.positions):
            views[position].copy_(mean[number].view(views[position].shape))
            errors[position].copy_(left_out[number].view(errors[position].shape))
        del self.matrices

    def _stack(self, views: list[Tensor]) -> Tensor:
        matrices = [views[position].reshape(self.shape) for position in self.positions]
        return torch.stack([matrix.to(accumulate_dtype(matrix.dtype)) for matrix in matrices])


def _start(bucket: Any, position: int, columns: int, rank: int) -> Tensor:
    """The first Q of a parameter: the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(bucket.names[position].encode()))
    start = torch.randn(columns, rank, generator=generator, dtype=accumulate_dtype(bucket.dtype))
    return start.to(bucket.device)
