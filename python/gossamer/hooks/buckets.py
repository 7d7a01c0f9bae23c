"""Gossamer's buckets for the buckets of torch's DDP, and the work that averages each. Used by state.py.

DDP plans its buckets again after the first step, and a resumed run begins with the first plan. The bits must not depend
on the plan. So a codec's bucket places each parameter by itself: the parameter alone decides in which row of the flat
memory a block lies, and so which rank sums it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer import _C
from gossamer.algorithms import ALGORITHMS, Algorithm, GradientAllReduce, PowerSGD
from gossamer.codec import Adaptive, Codec
from gossamer.comm import Communicator
from gossamer.engine.state import restore_fields, save_fields
from gossamer.engine.worker import with_context
from gossamer.errors import ConfigError
from gossamer.facts import Method, Settings

#: The methods that may be hooks, by name.
METHODS: dict[str, Method] = {
    method.name: method for algorithm in ALGORITHMS.values() for method in algorithm.methods if method.hook
}

_LEAST_UNIT = 16  # elements, so that pieces begin at multiples of 32 bytes or more


def algorithm_of(
    hook: str, *, codec: Codec | Adaptive | None, powersgd: PowerSGD | None
) -> tuple[Algorithm, str]:
    """Returns a hook's algorithm, and its settings as text, which the ranks compare.

    Raises:
        ConfigError: State got settings that this hook does not take, or lacks settings that it needs.
    """
    if codec is not None and hook != "compress":
        raise ConfigError(f"hooks.{hook}: takes no codec, got State(codec={codec!r}); use hooks.compress")
    if powersgd is not None and hook != "powersgd":
        raise ConfigError(f"hooks.{hook}: got State(powersgd={powersgd!r}), which is for hooks.powersgd")
    if hook == "compress" and codec is None:
        raise ConfigError("hooks.compress: give State the codec: State(model, codec=...)")
    chosen: Algorithm = powersgd or (
        GradientAllReduce(codec=codec) if codec is not None else METHODS[hook].make(Settings())
    )
    algorithm = chosen.for_any_buckets()
    own = algorithm.codec if isinstance(algorithm, GradientAllReduce) else algorithm
    return algorithm, repr(own)


class Buckets:
    """Gossamer's buckets for the buckets of one DDP.

    Args:
        names, params: all parameters that DDP's buckets may hold, in the same order on every rank.
    """

    def __init__(
        self, algorithm: Algorithm, names: Sequence[str], params: Sequence[Tensor], comm: Communicator
    ) -> None:
        self._algorithm, self._names, self._params, self._comm = algorithm, names, params, comm
        self._codecs = [algorithm.group_of(name, param) for name, param in zip(names, params, strict=True)]
        self._keys = [repr(codec) for codec in self._codecs]
        self._groups = list(dict.fromkeys(self._keys))
        # For each parameter: the units of all earlier parameters with the same codec.
        counts, self._first_units = dict.fromkeys(self._groups, 0), list[int]()
        for key, codec, param in zip(self._keys, self._codecs, params, strict=True):
            self._first_units.append(counts[key])
            counts[key] += -(-param.numel() // _unit(codec))
        self._progress = _Progress()
        self._works: dict[str, _C.BucketWork] = {}
        self._made: dict[int, _C.Bucket] = {}
        self._errors: dict[str, dict[str, Tensor]] = {}
        algorithm.connect(self._progress)  # type: ignore[arg-type]

    def arrange(
        self, index: int, numbers: list[int], dtype: torch.dtype, anew: bool
    ) -> list[tuple[_C.Bucket, _C.BucketWork]]:
        """Returns the buckets, with their work, that serve a bucket of DDP. Collective.

        Args:
            numbers: the positions of its parameters in `params`.
            anew: DDP has a new plan. Earlier buckets are dropped, and their errors are kept.
        """
        parts: list[tuple[_C.Bucket, _C.BucketWork]] = []

        def arrange() -> None:
            if anew:
                self._put_away()
            for group, key in enumerate(self._groups):
                own = [number for number in numbers if self._keys[number] == key]
                if any(self._params[number].numel() for number in own):
                    bucket = self._make(index * len(self._groups) + group, own, dtype)
                    if key not in self._works:
                        self._works[key] = self._algorithm.native_work(bucket) or self._python_work()
                    parts.append((bucket, self._works[key]))

        with_context(arrange, f"bucket {index} of DDP: arranging it raised", self._comm)()
        return parts

    def _make(self, index: int, numbers: list[int], dtype: torch.dtype) -> _C.Bucket:
        params = [self._params[each] for each in numbers]
        names = [self._names[each] for each in numbers]
        codec = self._codecs[numbers[0]]
        if codec is None:
            placement = _C.Placement.in_turn(params, 1, 1)
        else:
            first_units = [self._first_units[each] for each in numbers]
            placement = _by_parameter(params, first_units, _unit(codec), self._comm.chunks)
        bucket = _C.Bucket(index, numbers, params, names, placement, dtype)
        bucket.add_field("grad", self._comm if codec is not None else None)
        self._made[index] = bucket
        self._algorithm.setup(self._comm, [bucket])
        restore_fields([bucket], self._errors)
        for values in self._errors.values():
            for value in (values.pop(name) for name in names if name in values):
                if value.is_cuda:  # it may belong to another stream, which would reuse its memory too early
                    value.record_stream(torch.cuda.current_stream(value.device))
        return bucket

    def _python_work(self) -> _C.PythonWork:
        def call(bucket: _C.Bucket) -> None:
            self._progress.optimizer_steps = bucket.step
            of_ddp = bucket.index // len(self._groups)
            what = f"step {bucket.step} bucket {of_ddp} of DDP: {self._algorithm!r} raised"
            with_context(lambda: self._algorithm.bucket_ready(bucket), what, self._comm)()

        return _C.PythonWork(call)

    def _put_away(self) -> None:
        """Drops the buckets, and keeps their errors for the buckets that replace them."""
        for field, values in save_fields(self._made.values(), self._algorithm.state_fields).items():
            self._errors.setdefault(field, {}).update(values)
        self._made.clear()

    def state_dict(self) -> dict[str, Any]:
        """The errors by parameter name, and the algorithm's own state. Nothing may be queued."""
        live = save_fields(self._made.values(), self._algorithm.state_fields)
        kept = {name: value.clone() for name, value in self._errors.get("error", {}).items()}
        errors = kept | live.get("error", {})
        return {
            "errors": {name: errors[name] for name in self._names if name in errors},
            "algorithm": self._algorithm.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what state_dict() returned. Nothing may be queued. The next step arranges the buckets again."""
        self._made.clear()
        self._errors = {"error": {name: value.clone() for name, value in state["errors"].items()}}
        if state["algorithm"]:  # an algorithm finds a parameter by its bucket, so each gets one here
            for number, name in enumerate(self._names):
                if name in state["errors"]:
                    self._make(-1 - number, [number], state["errors"][name].dtype)
        self._algorithm.load_state_dict(state["algorithm"])
        self._put_away()


def _unit(codec: Any) -> int:
    """The number of elements that must stay together: a codec's block."""
    return max(codec.block, _LEAST_UNIT) if codec is not None else 1


def _by_parameter(params: Sequence[Tensor], first_units: Sequence[int], unit: int, rows: int) -> _C.Placement:
    """Places a codec's bucket: for each parameter, pieces (start in the parameter, elements, offset in the memory).

    Rank j sums row j of the flat memory. Every row gets an equal share of each parameter's units. Units that remain go
    to one row each, from the row after the last one that got such a unit. So the rows are about equally long.
    """
    filled = [0] * rows
    pieces: list[list[tuple[int, int, int, int]]] = []
    for param, first in zip(params, first_units, strict=True):
        numel, begin = param.numel(), 0
        units = -(-numel // unit)
        pieces.append([])
        for row in range(rows):
            share = units // rows + ((row - first) % rows < units % rows)
            if share:
                valid = min(share * unit, numel - begin)
                pieces[-1].append((begin, valid, row, filled[row]))
                filled[row] += share * unit
                begin += valid
    chunk = max(filled)
    placed = [[(begin, valid, row * chunk + at) for begin, valid, row, at in own] for own in pieces]
    return _C.Placement(placed, rows * chunk)


class _Progress:
    """The attributes of an engine's worker that an algorithm reads."""

    alive = True
    optimizer_steps = 0
