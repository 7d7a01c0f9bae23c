"""Makes what each of m ranks loads from what n ranks have saved, where n and m differ.

Every rank reads the same states and computes in rank order, so ranks agree without a message. An algorithm says by a
Merge for each of its fields what becomes of it; docs/resuming.md has the table.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.comm import Communicator
    from gossamer.engine.algorithm import Algorithm


class Merge(enum.Enum):
    """What becomes of a field of the algorithm's state at another number of ranks."""

    #: What codecs have left out. The part that the mean over the ranks still lacks stays the same.
    OWED = "owed"
    #: The ranks hold equal values, or begin to do so with rank 0's.
    EQUAL = "equal"
    #: It is made anew from the weights.
    ANEW = "anew"


def merge_states(
    states: Sequence[Mapping[str, Any]],
    algorithm: "Algorithm",
    comm: "Communicator",
    place: Mapping[str, int],
    params: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return the state of an engine of one of m ranks. See Engine.merged_state().

    Args:
        states: what the n ranks have saved, in rank order.
        place: Engine.place of the rank that loads.
        params: the parameters that the ranks share, by name.
    """
    require_all_ranks(states)
    apart = algorithm.independent
    # A mean over m ranks divides by m what a mean over n divided by n.
    share = comm.size / len(states) if algorithm.average else 1.0
    share /= algorithm.owed_by(comm)
    # By hosts, float16 is divided before the sum inside a host, and what is unsent is of these sums.
    half = states[0].get("saved_by", place)["largest_host"] / place["largest_host"]
    fields = merge_fields(
        [state["fields"] for state in states],
        algorithm.field_rules,
        owed_factor=lambda name: share * half if params[name].dtype == torch.half else share,
        where=type(algorithm).__name__,
    )
    return {
        **merge_counts(states, ("optimizer_steps", "backward_count"), apart=apart),
        **merge_counts(states, ("plan", "tuned"), apart=False),
        "fields": fields,
        "algorithm": states[0]["algorithm"],
        "saved_by": {**place, "merged": len(states)},
    }


def merge_fields(
    saved: Sequence[Mapping[str, Mapping[str, Tensor]]],
    rules: Mapping[str, Merge],
    *,
    owed_factor: Callable[[str], float],
    where: str,
) -> dict[str, dict[str, Tensor]]:
    """Return the fields of one of m ranks, by field and parameter name.

    Args:
        saved: the fields of each of the n ranks, in rank order.
        rules: what becomes of each field.
        owed_factor: owed_factor(parameter name) is what the sum of Merge.OWED over the n ranks is multiplied by.
        where: the algorithm, for the error message.

    Raises:
        ConfigError: a field has no rule.
    """
    merged: dict[str, dict[str, Tensor]] = {}
    for field in sorted({field for fields in saved for field in fields}):
        if field not in rules:
            raise ConfigError(
                f"part_of_checkpoint: {where} must say what becomes of '{field}' at another number of ranks, got "
                f"{dict(rules)}; make state_fields a dict of gs.Merge, or resume with {len(saved)} ranks"
            )
        if rules[field] is Merge.ANEW:
            continue
        merged[field] = {}
        for name in dict.fromkeys(name for fields in saved for name in fields.get(field, {})):
            values = [fields[field][name] for fields in saved if name in fields.get(field, {})]
            merged[field][name] = (
                (_sum(values) * owed_factor(name)).to(values[0].dtype)
                if rules[field] is Merge.OWED
                else values[0].clone()
            )
    return merged


def merge_values(values: Sequence[Any], where: str = "the state") -> Any:
    """Return the mean of what ranks have saved, of the kind of model.state_dict() or optimizer.state_dict().

    Values that are equal on all ranks stay as they are. Otherwise floating-point tensors and floats become their mean,
    and integers, which count something, the largest. Anything else becomes rank 0's. Where ranks lack a dictionary's
    key, the other ranks decide.

    Raises:
        ConfigError: lists differ in length, or tensors in shape.
    """
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for each in values for key in each)
        merged = {
            key: merge_values([each[key] for each in values if key in each], f"{where}[{key!r}]")
            for key in keys
        }
        return merged if type(first) is dict else _like(first, merged)
    if isinstance(first, (list, tuple)):
        lengths = [len(each) for each in values]
        if len(set(lengths)) > 1:
            raise ConfigError(
                f"part_of_checkpoint: {where} must be as long on all ranks, got lengths {lengths}"
            )
        parts = [merge_values(each, f"{where}[{i}]") for i, each in enumerate(zip(*values, strict=True))]
        return parts if isinstance(first, list) else tuple(parts)
    if isinstance(first, Tensor):
        if len({each.shape for each in values}) > 1:
            raise ConfigError(
                f"part_of_checkpoint: {where} must have one shape on all ranks, got {[list(v.shape) for v in values]}"
            )
        if all(torch.equal(each, first) for each in values[1:]):
            return first
        if first.is_floating_point():
            return (_sum(values) / len(values)).to(first.dtype)
        return first
    if type(first) is float and any(each != first for each in values):
        return sum(values) / len(values)
    return max(values) if type(first) is int else first


def merge_counts(states: Sequence[Mapping[str, Any]], keys: Sequence[str], *, apart: bool) -> dict[str, Any]:
    """Return what must be equal in the states of all ranks.

    Args:
        apart: ranks may have made different numbers of steps; the largest counts.

    Raises:
        ConfigError: something differs.
    """
    merged = {}
    for key in keys:
        values = [state[key] for state in states]
        if apart and isinstance(values[0], int):
            merged[key] = max(values)
        elif all(value == values[0] for value in values):
            merged[key] = values[0]
        else:
            rank = next(rank for rank, value in enumerate(values) if value != values[0])
            raise ConfigError(
                f"part_of_checkpoint: all ranks must have saved the same step, got {key} {values[0]} of rank 0 and "
                f"{values[rank]} of rank {rank}"
            )
    return merged


def require_all_ranks(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless the states are those of ranks 0, 1, ..., n - 1 of n."""
    found = [(each["saved_by"]["rank"], each["saved_by"]["size"]) for each in states if "saved_by" in each]
    if len(found) == len(states) and found != [(rank, len(states)) for rank in range(len(states))]:
        raise ConfigError(
            f"part_of_checkpoint: must be given the states of all ranks that saved, in rank order, got those of "
            f"{', '.join(f'rank {rank}/{size}' for rank, size in found)}"
        )


def merge_dicts(
    saved: Sequence[Mapping[str, Any]], merge_states: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Return one rank's dictionary: "algorithm" by merge_states(), and every other key by merge_values()."""
    keys = dict.fromkeys(key for each in saved for key in each)
    return {
        key: (
            merge_states([each["algorithm"] for each in saved])
            if key == "algorithm"
            else merge_values([each[key] for each in saved if key in each], key)
        )
        for key in keys
    }


def _sum(values: Sequence[Tensor]) -> Tensor:
    """The sum in rank order, in float64."""
    total = values[0].double()
    for value in values[1:]:
        total = total + value
    return total


def _like(first: Mapping[Any, Any], merged: dict[Any, Any]) -> Any:
    """An OrderedDict of a model's state has its modules' versions as an attribute."""
    made = type(first)(merged)  # type: ignore[call-arg]
    if hasattr(first, "_metadata"):
        made._metadata = first._metadata  # type: ignore[attr-defined]
    return made
