"""PowerSGD: gradients of matrices travel as two thin factors, with error feedback.

Source: Vogels, Karimireddy, Jaggi: PowerSGD (2019), arXiv:1905.13727. A bucket takes two all-reduces: one for the left
factors and what is not compressed, one for the right factors. Matrices of one shape are orthogonalised together.
"""

import math
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer import _C
from gossamer.algorithms.base import Algorithm, require_steps
from gossamer.codec import accumulate_dtype
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.engine import Merge, Unsent, Worker
from gossamer.facts import COMPRESSED, Cost, Job, Messages, Method, PlannedBucket, Traffic, Trial


class PowerSGD(Algorithm):
    """g <- P (mean of Q)^T for every matrix. P and Q have `rank` columns. What that leaves out is sent later.

    With M = g + e: P = orthogonal(mean of M Q), Q = M^T P, e = M - P Q^T. Q is kept from step to step. A gradient of
    more than two dimensions is a matrix of its first dimension and the rest. A gradient of fewer than two dimensions,
    or one whose factors would not save enough, is averaged as it is.

    Args:
        rank: the columns of P and Q.
        start_step: the number of first steps, which average exactly while gradients have a high rank.
        min_compression_rate: the least ratio of a matrix's elements to its factors' elements.
    """

    name = "powersgd"
    methods: ClassVar[tuple[Method, ...]] = (
        Method(
            "powersgd",
            lambda settings: PowerSGD(settings.rank),
            COMPRESSED,
            "sends two thin factors of each matrix's gradient and feeds back what they leave out",
            "powersgd.md",
            trial=Trial(),
            hook=True,
        ),
    )
    state_fields: ClassVar[dict[str, Merge]] = {"error": Merge.OWED}
    needs_optimizer = True
    weighs_gradients = True

    def __init__(self, rank: int = 4, *, start_step: int = 0, min_compression_rate: float = 2.0) -> None:
        require_steps("PowerSGD", what="positive integer", rank=rank)
        require_steps("PowerSGD", least=0, what="number of steps", start_step=start_step)
        self.rank: int = rank
        self.start_step: int = start_step
        self.min_compression_rate: float = min_compression_rate
        self._in_rank_order = False

    def connect(self, worker: Worker) -> None:
        super().connect(worker)
        self._right: dict[str, Tensor] = {}  # Q by parameter name, [columns of M, rank]
        self._before: dict[int, dict[str, Tensor]] = {}  # by bucket: Q before the backward that has begun
        self._groups: dict[int, list[_Group]] = {}

    def for_any_buckets(self) -> "PowerSGD":
        """Returns this object. It now sums in rank order, so no bit depends on where in a message a factor lies."""
        self._in_rank_order = True
        return self

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        return Traffic(in_backward=[self._factors_of(bucket, messages) for bucket in messages.buckets])

    def _factors_of(self, bucket: PlannedBucket, messages: Messages) -> Job:
        plain, left, right, products = thin_factors(bucket, self.rank, self._pays)
        cpu_s = messages.product_s(4 * 2 * products) + messages.pass_s(3 * bucket.nbytes)
        job = Job(Cost(), cpu_s, bucket.done)
        for count in (left + plain, right):
            if count:
                job += messages.sum(count)
        return job

    def _pays(self, whole: int, thin: int) -> bool:
        return whole >= self.min_compression_rate * thin > 0

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        self._comm = comm
        for bucket in buckets:
            groups: dict[tuple[int, int], _Group] = {}
            for position, param in enumerate(bucket.params):
                shape = param.size(0) if param.dim() else 1, math.prod(param.shape[1:])
                columns = min(self.rank, *shape)
                if param.dim() > 1 and self._pays(param.numel(), columns * sum(shape)):
                    groups.setdefault(shape, _Group(shape)).positions.append(position)
                    self._right.setdefault(
                        bucket.names[position], _start(bucket, position, shape[1], columns)
                    )
            self._groups[bucket.index] = list(groups.values())
            Unsent(bucket).prepare()

    def bucket_ready(self, bucket: _C.Bucket) -> None:
        with Unsent(bucket).joining("grad") as error:
            if self._comm.size > 1:
                self._reduce(bucket)
            elif error is not None:  # it is not zero if more ranks have saved it
                bucket.flat().add_(error)
                error.zero_()

    def owed_by(self, comm: Communicator) -> int:
        return comm.size  # also by hosts: each rank adds its error to its own matrices

    def _reduce(self, bucket: _C.Bucket) -> None:
        views, errors = bucket.views(), bucket.views("error")
        groups = self._groups[bucket.index] if self.optimizer_steps >= self.start_step else []
        self._before[bucket.index] = {name: self._right[name] for name in bucket.names if name in self._right}
        compressed = {position for group in groups for position in group.positions}
        for group in groups:
            rights = [self._right[bucket.names[position]] for position in group.positions]
            group.load(views, errors, rights)
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
            group.store(views, errors)
            for position, right in zip(group.positions, group.right, strict=True):
                self._right[bucket.names[position]] = right.mT.nan_to_num(0.0, 0.0, 0.0)

    def _mean(self, tensors: list[Tensor]) -> None:
        """Replaces the tensors by their mean over the ranks, by one all-reduce in float32 (float64 for float64)."""
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).to(accumulate_dtype(tensor.dtype)) for tensor in tensors])
        flat.mul_(1.0 / self._comm.size)
        all_reduce(flat, deterministic=self._in_rank_order, group=self._comm)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def before_backward(self, step: int) -> None:
        self._before.clear()

    def why_not_elastic(self) -> str:
        return ""

    def shared_state(self, begun: Iterable[int] = ()) -> dict[str, Any]:
        right = dict(self._right)
        for index in begun:
            right |= self._before.get(index, {})
        return {"right": right}

    def take_shared_state(self, state: dict[str, Any]) -> None:
        self._right |= state["right"]

    def state_dict(self) -> dict[str, Any]:
        return {"right": {name: right.clone() for name, right in self._right.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, right in state["right"].items():
            self._right[name].copy_(right)


@lru_cache(maxsize=4096)
def thin_factors(
    bucket: PlannedBucket, rank: int, pays: Callable[[int, int], bool]
) -> tuple[int, int, int, int]:
    """Counts the elements sent whole, those of left and of right factors, and the multiplications of one product.

    Args:
        pays: whether a matrix of so many elements is to be sent as factors of so many elements.
    """
    plain = left = right = products = 0
    for shape in bucket.shapes:
        rows, columns = (shape[0] if shape else 1), math.prod(shape[1:])
        thin = min(rank, rows, columns)
        if len(shape) > 1 and pays(rows * columns, thin * (rows + columns)):
            left += thin * rows
            right += thin * columns
            products += thin * rows * columns
        else:
            plain += rows * columns
    return plain, left, right, products


class _Group:
    """The k matrices [rows, columns] of one shape in a bucket, during its bucket_ready.

    The error's memory holds M until the new error is known, because new tensors of a gradient's size cost more than all
    products together. Thin factors are stored transposed: on a CPU products with them are then 5 times as fast.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.positions: list[int] = []

    def load(self, views: list[Tensor], errors: list[Tensor], rights: list[Tensor]) -> None:
        """Computes M, and `left`. rights: the right factors of the step before, [columns, rank] each."""
        self.matrices = [
            errors[position].add_(views[position]).reshape(self.shape) for position in self.positions
        ]
        products = [torch.mm(matrix, right) for matrix, right in zip(self.matrices, rights, strict=True)]
        self.left = torch.stack(products)

    def multiply_back(self) -> None:
        """Computes `right` from the mean of `left`. QR allows zeros and columns that depend on each other."""
        self._means = self.left
        self.left = torch.linalg.qr(self.left)[0]
        self.own = torch.stack(
            [torch.mm(p.mT, matrix) for p, matrix in zip(self.left, self.matrices, strict=True)]
        )
        self.right = self.own.clone()  # [k, rank, columns]

    def store(self, views: list[Tensor], errors: list[Tensor]) -> None:
        """Writes the gradients and the errors, from the mean of `right`."""
        clean = self._is_finite()
        for number, position in enumerate(self.positions):
            left, matrix = self.left[number], self.matrices[number]
            _product_into(views[position], left, self.right[number])
            matrix.addmm_(left, self.own[number], alpha=-1)
            if not clean:
                matrix.nan_to_num_(0.0, 0.0, 0.0)  # a step skipped for its NaN must not poison the later ones
            if matrix.data_ptr() != errors[position].data_ptr():  # other strides, so reshape() made a copy
                errors[position].copy_(matrix.view(errors[position].shape))
        del self.matrices

    def _is_finite(self) -> bool:
        """False if M may hold a NaN or Inf, which both products would show. False on an accelerator, without a wait."""
        if self.left.device.type != "cpu":
            return False
        return all(bool(factor.isfinite().all()) for factor in (self._means, self.left, self.own))


def _product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Sets `out`, of any shape, strides and dtype, to the product of left and right."""
    if out.dtype == left.dtype and out.is_contiguous():
        torch.mm(left, right, out=out.view(left.size(0), -1))
    else:
        out.copy_(torch.mm(left, right).view(out.shape))


def _start(bucket: _C.Bucket, position: int, columns: int, rank: int) -> Tensor:
    """Returns the first Q of a parameter, which is the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(bucket.names[position].encode()))
    start = torch.randn(columns, rank, generator=generator, dtype=accumulate_dtype(bucket.dtype))
    return start.to(bucket.device).mT.contiguous().mT
