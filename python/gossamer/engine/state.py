"""Saves and restores an algorithm's state in flat memory, by parameter name.

So the state follows its parameters into another bucket plan and into a checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gossamer import _C
from gossamer.comm import Communicator
from gossamer.engine.agree import require_equal
from gossamer.errors import ConfigError

Fields = dict[str, dict[str, Tensor]]  # field -> parameter name -> values


def require_state(
    control: Communicator,
    state: Mapping[str, Any],
    names: Sequence[str],
    codecs: Sequence[object],
    *,
    apart: bool = False,
) -> None:
    """Raise ConfigError on every rank unless all ranks can load the state that they are given. Collective.

    The states of all ranks must be of one step.

    Args:
        apart: ranks may have made different numbers of steps.
        names: the names of the model's parameters.
        codecs: the codecs that autotune may choose beside the algorithm's own.
    """
    problem = _problem_of(state, names, codecs, control.size)
    common = ("plan", "tuned") if apart else ("optimizer_steps", "backward_count", "plan", "tuned")
    lines = [f"{key} {state.get(key)}" for key in common]
    require_equal(control, [*lines, f"problem {problem!r}"], "the loaded state")
    if problem:
        raise ConfigError(f"load_state_dict: must be given what state_dict() returned, got {problem}")


def _problem_of(state: Mapping[str, Any], names: Sequence[str], codecs: Sequence[object], size: int) -> str:
    known = {"optimizer_steps", "backward_count", "plan", "tuned", "fields", "algorithm"}
    if set(state) - {"saved_by"} != known:
        return f"keys {sorted(state)}"
    saved_by = state.get("saved_by", {})
    if state["fields"] and saved_by.get("size", size) != size:
        return (
            f"the state of rank {saved_by['rank']}/{saved_by['size']} in a run of {size} ranks; give the states of all "
            f"ranks to part_of_checkpoint()"
        )
    strangers = sorted({name for bucket in state["plan"] for name in bucket} - set(names))
    if strangers:
        return f"unknown parameters {strangers}"
    tuned = set(state["tuned"]["codecs"].values()) if state["tuned"] else set()
    if unknown := sorted(tuned - set(map(repr, codecs))):
        return f"parameters tuned to {unknown}, which autotune=Autotune(codecs=...) must allow here too"
    return ""


def save_fields(buckets: Iterable[_C.Bucket], fields: Iterable[str]) -> Fields:
    """Return copies of those of `fields` that the buckets have."""
    saved: Fields = {}
    for bucket in buckets:
        for field in set(bucket.fields) & set(fields):
            values = ((name, bucket.value(field, i)) for i, name in enumerate(bucket.names))
            saved.setdefault(field, {}).update(values)
    return saved


def restore_fields(buckets: Iterable[_C.Bucket], saved: Fields) -> None:
    """Add the saved fields to the buckets that hold their parameters, and fill them.

    Raises:
        ConfigError: a saved tensor does not have its parameter's shape.
    """
    for bucket in buckets:
        params = bucket.params
        for field, values in saved.items():
            found = [(position, name) for position, name in enumerate(bucket.names) if name in values]
            if found:
                bucket.add_field(field, dtype=values[found[0][1]].dtype)
            for position, name in found:
                wanted, value = params[position].shape, values[name]
                if value.shape != wanted:
                    raise ConfigError(
                        f"load_state_dict: '{field}' of parameter '{name}' must have the shape {list(wanted)}, "
                        f"got {list(value.shape)}"
                    )
                bucket.set_value(field, position, value)
