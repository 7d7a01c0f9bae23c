"""What one rank brings from a group that has ended into the next one: counters, gradients, the algorithm's state.

engine.py makes an Own of the native engine that has failed, and another engine takes it.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer import _C
from gossamer.comm import is_default
from gossamer.engine.algorithm import Algorithm
from gossamer.engine.buckets import Buckets
from gossamer.engine.merging import Merge
from gossamer.engine.state import Fields, save_fields


@dataclass(frozen=True)
class Own:
    """What a rank has of its own, independent of any group.

    Attributes:
        backwards: synchronised backwards that have ended.
        optimizer_steps: steps that the optimizers have taken.
        in_backward: a backward has failed after them.
        plan: the names of the parameters of each bucket.
        gradients: in that backward, this rank's own gradients by parameter name. Copies.
    """

    backwards: int
    optimizer_steps: int
    in_backward: bool
    plan: list[list[str]]
    gradients: dict[str, Tensor]
    _before: Fields
    _after: Fields
    _shared_before: dict[str, Any]
    _shared_after: dict[str, Any]

    def shared(self, *, redo: bool) -> dict[str, Any]:
        """Return the algorithm's shared_state(), at the same time as fields()."""
        return self._shared_before if redo else self._shared_after

    def fields(self, *, redo: bool) -> Fields:
        """Return the algorithm's fields: as they were before the backward, or as that backward has left them.

        A message that was on its way when the group failed leaves nothing unsent: the others have got it.
        """
        return self._before if redo else self._after


def own_of(
    native: _C.Engine,
    buckets: Buckets,
    algorithm: Algorithm,
    counts: tuple[int, int],
    *,
    in_backward: bool,
) -> Own:
    """Return what the rank of this engine has. `counts`: backwards and optimizer steps that have ended."""
    anew = {name for name, rule in algorithm.field_rules.items() if rule is Merge.ANEW}
    before = save_fields(buckets.all, set(algorithm.state_fields) - anew)
    after = {field: dict(values) for field, values in before.items()}
    gradients: dict[str, Tensor] = {}
    begun = native.flight.before() if in_backward else {}
    for bucket in buckets.all:
        kept, done = begun.get(bucket.index, ({}, True))
        for position, (name, param) in enumerate(zip(bucket.names, bucket.params, strict=True)):
            if in_backward and param.grad is not None and "grad" in bucket.fields:
                gradients[name] = (
                    _part(bucket, position, kept["grad"]) if "grad" in kept else param.grad.detach().clone()
                )
            for field in set(kept) & set(before):
                before[field][name] = _part(bucket, position, kept[field])
                if not done:
                    after[field][name] = before[field][name].new_zeros(before[field][name].shape)
    shared = algorithm.shared_state(begun), algorithm.shared_state()
    return Own(*counts, in_backward, buckets.names, gradients, before, after, *shared)


def _part(bucket: _C.Bucket, position: int, flat: Tensor) -> Tensor:
    """Return a parameter's part of a copy of a bucket's flat memory, as a copy."""
    view = bucket.views("grad")[position]
    offset = view.storage_offset() - bucket.flat("grad").storage_offset()
    return flat.as_strided(view.shape, view.stride(), flat.storage_offset() + offset).clone()


def why_not_elastic(face: Any) -> str:
    """Return why the group of this wrapped model cannot be replaced; empty if it can."""
    engine, algorithm = face.engine, face.engine.algorithm
    if refusal := algorithm.why_not_elastic():
        return str(refusal)
    if not is_default(face.wrapped_over):
        return (
            f"the model must be wrapped over the default group, without a list of hosts, got "
            f"process_group={face.wrapped_over!r}"
        )
    if engine.has_counted and algorithm.weighs_gradients:
        return "count() must not be used, because a step that is sent again has no counts"
    if engine.tuned is not None or engine.is_tuning:
        return "autotune must be off, because its measurements belong to one group"
    return ""
