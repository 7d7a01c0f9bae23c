"""The parts of parameters that a rank steps, and what it keeps of them from one group to the next."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import _C
from gossamer.torch_private import tree_map_only

State = dict[int, dict[str, Any]]  # of whole parameters, by their place in the optimizer
Span = tuple[int, int]  # elements of a parameter's memory


@dataclass
class Piece:
    """A part of one parameter that this rank steps.

    Args:
        index: the parameter's place in the optimizer.
        begin, end: the part, in elements of the parameter's memory.
        leaf: a view of the weights, which the inner optimizer steps.
        gradient: its mean gradient.
        unsent: what the codec has left out of its changes, or None.
    """

    index: int
    param: nn.Parameter
    begin: int
    end: int
    leaf: nn.Parameter
    gradient: Tensor
    unsent: Tensor | None


@dataclass
class Held:
    """What a rank keeps of a piece between two groups. The weights are those of the parameter.

    Args:
        state: the inner optimizer's. Tensors of [end - begin] are of the elements, others of the whole piece.
        gradient: the mean gradient [end - begin], if the piece has one.
        unsent: see Piece.
    """

    index: int
    begin: int
    end: int
    state: dict[str, Any]
    gradient: Tensor | None
    unsent: Tensor | None

    @property
    def key(self) -> tuple[int, int, int]:
        return self.index, self.begin, self.end

    def message(self, params: list[nn.Parameter]) -> tuple[Any, ...]:
        """Return copies of it, and of the weights, as broadcast_state() takes them."""
        weights = in_row(params[self.index].data)[self.begin : self.end]
        return *self.key, *tree_map_only(Tensor, Tensor.clone, (weights, self.unsent, self.state))

    def cut_at(self, places: Iterable[int]) -> list["Held"]:
        """Return its parts between these elements of the parameter."""
        ends = [self.begin, *sorted(at for at in places if self.begin < at < self.end), self.end]
        return [self.part(*span) for span in itertools.pairwise(ends)]

    def part(self, begin: int, end: int) -> "Held":
        """Return a part of it."""
        inside, whole = slice(begin - self.begin, end - self.begin), self.end - self.begin
        state = {key: _cut_if_of(each, whole, inside) for key, each in self.state.items()}
        gradient, unsent = (
            each[inside] if each is not None else None for each in (self.gradient, self.unsent)
        )
        return Held(self.index, begin, end, state, gradient, unsent)


@dataclass
class Share:
    """One rank's share of a bucket, which several ranks may step.

    Args:
        gradient: the mean gradients of the share [numel / size].
        unsent: what the codec has left out of the changes of the share, or None.
    """

    bucket: _C.Bucket
    begin: int
    end: int
    gradient: Tensor
    unsent: Tensor | None
    before: Tensor | None = None  # the weights before a step
    stepped: Tensor | None = None  # the weights after it, while they are gathered
    pieces: list[Piece] = field(default_factory=list)

    @property
    def weights(self) -> Tensor:
        return self.bucket.flat("weight")[self.begin : self.end]


def outside(span: Span, spans: Iterable[Span]) -> list[Span]:
    """The parts of a span that lie in none of the others."""
    found, at = [], span[0]
    for begin, end in sorted(spans):
        if begin >= span[1]:
            break
        if at < begin:
            found.append((at, begin))
        at = max(at, end)
    return [*found, (at, span[1])] if at < span[1] else found


def _cut_if_of(value: Any, numel: int, inside: slice) -> Any:
    """A part of a tensor of `numel` elements in a row, and a copy of any other tensor."""
    if not isinstance(value, Tensor):
        return value
    return value[inside] if value.shape == (numel,) else value.clone()


def _piece(
    key: tuple[int, int, int], param: nn.Parameter, weights: Tensor, gradient: Tensor, unsent: Tensor | None
) -> Piece:
    """A piece of a parameter. Weights and gradient are its elements in a row, and stay where they are."""
    shape = weights.shape if param.dim() else ()  # the state of a scalar is made of scalars
    index, begin, end = key
    return Piece(index, param, begin, end, nn.Parameter(weights.view(shape)), gradient.view(shape), unsent)


def piece_again(held: Held, param: nn.Parameter) -> Piece:
    """A piece of the same elements, wherever the parameter's memory is now."""
    weights = in_row(param.data)[held.begin : held.end]
    gradient = torch.zeros_like(weights) if held.gradient is None else held.gradient
    piece = _piece(held.key, param, weights, gradient, held.unsent)
    piece.leaf.grad = None if held.gradient is None else piece.gradient
    return piece


def copy_common(
    piece: Piece,
    span: Span,
    unsent: Tensor | None,
    of_span: dict[str, Any],
    state: dict[nn.Parameter, dict[str, Any]],
) -> None:
    """Copy the state of a span of a parameter as far as the piece has it."""
    begin, end = max(piece.begin, span[0]), min(piece.end, span[1])
    if begin >= end:
        return
    source, target = slice(begin - span[0], end - span[0]), slice(begin - piece.begin, end - piece.begin)
    own = state.setdefault(piece.leaf, {}) if of_span else {}
    for key, value in of_span.items():
        if isinstance(value, Tensor) and value.shape == (span[1] - span[0],):
            own.setdefault(key, value.new_zeros(piece.end - piece.begin))[target] = value[source]
        else:
            own[key] = value.clone() if isinstance(value, Tensor) else value
    if piece.unsent is not None and unsent is not None:
        piece.unsent[target] = unsent[source].to(piece.unsent.device)


def in_row(x: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory [numel]."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def part_of(value: Any, piece: Piece) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != piece.param.shape:
        return value
    like = torch.empty_strided(piece.param.shape, piece.param.stride(), dtype=value.dtype)
    return in_row(like.copy_(value))[piece.begin : piece.end].clone()


def cut_share(share: Share, place: dict[nn.Parameter, int]) -> None:
    """Make the pieces of the parameters that lie in a share."""
    bucket = share.bucket
    start = bucket.flat("weight").data_ptr()
    for param, view in zip(bucket.params, bucket.views("weight"), strict=True):
        at = (view.data_ptr() - start) // view.element_size()
        begin, end = max(share.begin, at), min(share.end, at + view.numel())
        if begin >= end:
            continue
        inside = slice(begin - share.begin, end - share.begin)
        unsent = share.unsent[inside] if share.unsent is not None else None
        key = place[param], begin - at, end - at  # type: ignore
        share.pieces.append(_piece(key, param, share.weights[inside], share.gradient[inside], unsent))  # type: ignore
