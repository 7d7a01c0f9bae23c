"""How each hook averages: which codec, for which parameter; or PowerSGD, bucket by bucket. Used by state.py.

Codecs with native arithmetic run without Python; those written in Python, and PowerSGD, are called on the worker.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gossamer import _C
from gossamer.algorithms import PowerSGD
from gossamer.codec import BF16, FP16, Adaptive, Codec, ErrorFeedback, Identity, Int4, Int8, OneBit
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.engine.state import restore_fields, save_fields
from gossamer.engine.worker import with_context
from gossamer.errors import ConfigError

#: The hooks that bring their codec.
CODECS: dict[str, Codec] = {
    "bytegrad": Int8(),
    "int8": ErrorFeedback(Int8()),
    "int4": ErrorFeedback(Int4()),
    "onebit": ErrorFeedback(OneBit()),
    "deterministic": Identity(),
    "bf16": BF16(),
    "fp16": FP16(),
}


class Methods:
    """What _C.CommHook is made of, for codecs."""

    whole: Callable[..., None] | None = None

    def __init__(
        self, codec: Codec | Adaptive, names: Sequence[str], params: Sequence[Tensor], comm: Any
    ) -> None:
        self.settings = repr(codec)
        chosen = [
            (codec.choose(name, param) or Identity()) if isinstance(codec, Adaptive) else codec
            for name, param in zip(names, params, strict=True)
        ]
        distinct = {repr(each): each for each in chosen}
        self.native = [_method(each, comm) for each in distinct.values()]
        numbers = {key: number for number, key in enumerate(distinct)}
        self.method_of = [numbers[repr(each)] for each in chosen]

    def state_dict(self) -> dict[str, Any]:
        """What is not in the errors of parameters: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what state_dict() returned."""


def methods_of(
    hook: str,
    names: Sequence[str],
    params: Sequence[Tensor],
    comm: Communicator,
    *,
    codec: Codec | Adaptive | None,
    powersgd: PowerSGD | None,
) -> Any:
    """The Methods of a hook by its name.

    Raises:
        ConfigError: settings of State that this hook does not take, or needs.
    """
    if codec is not None and hook != "compress":
        raise ConfigError(f"hooks.{hook}: takes no codec, got State(codec={codec!r}); use hooks.compress")
    if powersgd is not None and hook != "powersgd":
        raise ConfigError(f"hooks.{hook}: got State(powersgd={powersgd!r}), which is for hooks.powersgd")
    if hook == "compress" and codec is None:
        raise ConfigError("hooks.compress: give State the codec: State(model, codec=...)")
    if hook == "powersgd":
        return LowRank(powersgd or PowerSGD(), names, params, comm)
    return Methods(codec or CODECS[hook], names, params, comm)


def _method(codec: Codec, comm: Communicator) -> Any:
    if codec.native is not None:
        return _C.HookMethod(codec.native, codec.feeds_back, codec.block, None)

    def call(flat: Tensor, error: Tensor | None, nonce: int) -> None:
        def task() -> object:
            return all_reduce(flat, codec=codec, op="mean", error=error, nonce=nonce, group=comm)

        with_context(task, f"hooks: {codec!r} raised", comm)()

    return _C.HookMethod(None, codec.feeds_back, codec.block, call)


class LowRank:
    """PowerSGD on DDP's buckets. Factors are averaged in rank order, so no bit depends on the buckets."""

    method_of: tuple[int, ...] = ()
    native: tuple[Any, ...] = ()

    def __init__(
        self, algorithm: PowerSGD, names: Sequence[str], params: Sequence[Tensor], comm: Communicator
    ) -> None:
        self.settings = repr(algorithm)
        self._algorithm, self._names, self._params, self._comm = algorithm, names, params, comm
        self._progress = _Progress()
        self._buckets: dict[int, Any] = {}
        self._saved: dict[str, dict[str, Tensor]] = {}
        algorithm.connect(self._progress)  # type: ignore[arg-type]
        algorithm.sum_in_rank_order()

    def whole(self, step: int, index: int, numbers: list[int], gradients: list[Tensor]) -> None:
        """The gradients of a bucket, in place. On the worker."""
        self._progress.optimizer_steps = step

        def task() -> None:
            bucket = self._bucket(index, numbers)
            for view, gradient in zip(bucket.views(), gradients, strict=True):
                view.copy_(gradient)
            self._algorithm.bucket_ready(bucket)
            for view, gradient in zip(bucket.views(), gradients, strict=True):
                gradient.copy_(view)

        with_context(task, f"step {step} bucket {index} of DDP: {self._algorithm!r} raised", self._comm)()

    def _bucket(self, index: int, numbers: list[int]) -> Any:
        known = self._buckets.get(index)
        if known is not None and known.param_indices == numbers:
            return known
        if any(set(bucket.param_indices) & set(numbers) for bucket in self._buckets.values()):
            self._put_away()  # DDP has made its buckets anew
        params, names = (
            [self._params[number] for number in numbers],
            [self._names[number] for number in numbers],
        )
        bucket = _C.Bucket(index, numbers, params, names, 1, 1)
        bucket.add_field("grad")
        self._buckets[index] = bucket
        self._algorithm.setup(self._comm, list(self._buckets.values()))
        restore_fields([bucket], self._saved)
        for values in self._saved.values():
            for name in names:
                values.pop(name, None)
        return bucket

    def _put_away(self) -> None:
        fields = save_fields(self._buckets.values(), self._algorithm.state_fields)
        for field, values in fields.items():
            self._saved.setdefault(field, {}).update(values)
        self._buckets.clear()

    def state_dict(self) -> dict[str, Any]:
        """The errors and the right factors, by parameter name."""
        self._put_away()
        fields = {field: dict(values) for field, values in self._saved.items()}
        return {"fields": fields, "algorithm": self._algorithm.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what state_dict() returned."""
        self._buckets.clear()
        self._saved = {field: dict(values) for field, values in state["fields"].items()}
        numbers = {name: number for number, name in enumerate(self._names)}
        for name in list(
            next(iter(self._saved.values()), {})
        ):  # the algorithm knows a parameter by its bucket
            self._bucket(-1 - numbers[name], [numbers[name]])
        self._algorithm.load_state_dict(state["algorithm"])


class _Progress:
    """What an algorithm asks of an engine's worker."""

    alive = True
    optimizer_steps = 0
