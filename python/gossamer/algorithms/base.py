"""What an algorithm is: the moments of a step at which it may act. The default at each moment is nothing.

An algorithm reads like its paper: straight-line blocking code, called by the engine at the right moment, on the
right thread, in the same order on every rank. See docs/adding-an-algorithm.md.
"""

from abc import ABC
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from gossamer import _C
from gossamer.codec import Codec
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.engine import Unsent, Worker
from gossamer.errors import ConfigError
from gossamer.facts import Messages, Method, Traffic


class Algorithm(ABC):
    """Subclass, override the moments you need, and add one line to the name table in __init__.py.

    Either `native_work` returns an object of gossamer._C that does a bucket's work without the GIL, or
    `bucket_ready` does it in Python. Ranks compare their algorithms' repr, which shows the public attributes.
    """

    #: The name that DataParallel(algorithm="...") takes.
    name: ClassVar[str]

    #: The ways to use the algorithm that the planner, the benchmarks and the hooks offer by name.
    methods: ClassVar[tuple[Method, ...]] = ()

    #: The flat memory of every bucket that the group's wire can reach: "grad" for algorithms that send gradients,
    #: "weight" for those that send parameters, which then are views of it.
    fields: ClassVar[tuple[str, ...]] = ("grad",)

    #: Fields of its own that must survive, in another bucket plan and in a checkpoint.
    state_fields: ClassVar[tuple[str, ...]] = ()

    #: Whether DataParallel must be given the optimizer, because steps are counted.
    needs_optimizer: ClassVar[bool] = False

    #: The one class of optimizer that the algorithm works with. None: any.
    optimizer_class: ClassVar[type[torch.optim.Optimizer] | None] = None

    #: Whether the bits of its results depend neither on bucket sizes nor on the backend.
    deterministic: bool = False

    #: Whether a rank that is out of batches may go on with zero gradients, as model.join() needs it. True where all
    #: that the ranks do together is to replace gradients by their mean (or sum), in native_work or bucket_ready.
    uneven_inputs: ClassVar[bool] = False

    #: Whether gradient_ready() and after_backward() are called. Only for algorithms that are never in lockstep.
    follows_gradients: ClassVar[bool] = False

    #: Whether what gradients are replaced by is their mean over the ranks; False: their sum.
    average: bool = True

    _worker: Worker | None = None

    @property
    def own_weights(self) -> bool:
        """Whether ranks may hold different weights between steps, so that each must save its own."""
        return "weight" in self.fields

    @property
    def lockstep(self) -> bool:
        """Whether the ranks agree at the end of each synchronised backward, which makes all wait for the slowest.

        In lockstep they find out together about an error on one of them, about parameters that some did not use, and
        about different numbers of steps. False for algorithms whose ranks are to train without each other.
        """
        return True

    @property
    def independent(self) -> bool:
        """Whether there are steps out of lockstep, so that faces must not add a collective to each."""
        return False

    def __repr__(self) -> str:
        settings = (f"{name}={value!r}" for name, value in sorted(vars(self).items()) if name[0] != "_")
        return f"{type(self).__name__}({', '.join(settings)})"

    def connect(self, worker: Worker) -> None:
        """Called first, when a model is wrapped. What belongs to one run begins here, not in __init__.

        Raises:
            ConfigError: the object serves another model that is still wrapped.
        """
        self.require_free()
        self._worker = worker

    def require_free(self) -> None:
        """ConfigError if the object serves a model that is wrapped."""
        if self._worker is not None and self._worker.alive:
            raise ConfigError(
                f"{type(self).__name__}: this object serves another wrapped model; make one for each model"
            )

    @classmethod
    def make_optimizer(
        cls, params: Iterable[torch.Tensor], *, lr: float, warmup_steps: int
    ) -> torch.optim.Optimizer:
        """An optimizer that the algorithm works with: AdamW if it works with any.

        Args:
            warmup_steps: the first steps, which are exact, for an algorithm that has such steps.
        """
        return torch.optim.AdamW(params, lr=lr, fused=True)

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        """What the algorithm sends and computes in a step, for the planner.

        Args:
            messages: the buckets of a model, and the price of each message.
            warm: False asks about a step of the warm-up, for an algorithm that has one.

        Raises:
            ConfigError: the algorithm does not say it.
        """
        raise ConfigError(
            f"plan: {type(self).__name__} must define traffic(messages); see docs/adding-an-algorithm.md"
        )

    def for_any_buckets(self) -> "Algorithm":
        """An algorithm with the same settings whose result does not depend on which parameters share a bucket.

        The hooks for stock DDP need it, because DDP plans its buckets itself.

        Raises:
            ConfigError: there is none, so the algorithm cannot be a hook.
        """
        raise ConfigError(f"hooks: {self!r} cannot be a hook, because it does not define for_any_buckets()")

    def use_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Called before connect(), with the optimizers that DataParallel was given."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken so far; any thread."""
        assert self._worker is not None
        return self._worker.optimizer_steps

    def submit(self, bucket: _C.Bucket, task: Callable[[_C.Bucket], None]) -> None:
        """Lets the engine's worker call task(bucket), behind everything before it; the caller goes on.

        Every rank submits the same, in the same order. Errors come out of wait(), or of the backward that ends next.
        """
        assert self._worker is not None
        what = f"step {bucket.step} {bucket!r}: {self!r}"
        self._worker.submit(lambda: task(bucket), what)

    def reduce_field(
        self,
        bucket: _C.Bucket,
        field: str,
        *,
        codec: Codec | None,
        group: Communicator | None,
        step: int,
        op: str = "mean",
        deterministic: bool = False,
    ) -> None:
        """all_reduce of a bucket's field, in place, with what is Unsent of it. Blocking, collective.

        `step` tells the random numbers of a stochastic codec apart.
        """
        with Unsent.by(codec, bucket).joining(field) as error:
            all_reduce(
                bucket.flat(field),
                codec=codec,
                op=op,
                deterministic=deterministic,
                error=error,
                nonce=step * 2**20 + bucket.index,
                group=group,
            )

    def wait(self) -> None:
        """Until all is done that was submitted. Raises its error."""
        assert self._worker is not None
        self._worker.wait()

    def block(self) -> int:
        """Parameters start at multiples of this many elements in a bucket's flat memory (and of 64 bytes)."""
        return 1

    def alignment(self, comm: Communicator) -> int:
        """Bucket sizes are padded to a multiple of this many elements."""
        return 1

    def group_of(self, name: str, param: torch.Tensor) -> Hashable:
        """Parameters of different groups never share a bucket."""
        return None

    def bucket_limit(self, model_bytes: int) -> int | None:
        """Bytes at which a bucket closes at the latest, in a model of so many; None: as the user says."""
        return None

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        """Called at wrap, and again whenever the plan changes; `buckets` is then the new plan.

        bucket.add_field(name) gives zeros [numel] to keep state in, or what is there already.
        """

    def native_work(self, bucket: _C.Bucket) -> _C.BucketWork | None:
        """The native work of a bucket, or None: bucket_ready does it."""
        return None

    def codec_choices(self, extra: Sequence[Codec | None]) -> list[Codec | None]:
        """For tuning: what a bucket may travel by beside what it does travel by; None means exactly.

        Called before the buckets are made.

        Args:
            extra: codecs that the user allows beside those which lose no more than the algorithm's own.

        Raises:
            ConfigError: the algorithm cannot take one of `extra`.
        """
        if extra:
            raise ConfigError(f"autotune: {self!r} does not let codecs be chosen, got {list(extra)!r}")
        return []

    def codec_of(self, bucket: _C.Bucket) -> Codec | None:
        """By what the gradients of a bucket travel, for reports; None: as they are, or not at all."""
        return None

    def use_codecs(self, codecs: Mapping[str, Codec | None]) -> None:
        """From the next setup on: what parameters travel by, by name, where that is not the algorithm's own choice."""
        if codecs:
            raise ConfigError(f"{self!r} does not let codecs be chosen, got {dict(codecs)!r}")

    def before_forward(self, step: int) -> None:
        """In the training thread, before each forward that records gradients; `step` counts optimizer steps."""

    def bucket_ready(self, bucket: _C.Bucket) -> None:
        """On the engine's worker thread, in bucket order, when all gradients of `bucket` are in place.

        `bucket.flat()` is the flat gradient [numel]; change it in place. Blocking is fine: backward goes on. Only
        where `fields` has "grad".
        """
        raise NotImplementedError(f"{type(self).__name__} must define native_work or bucket_ready")

    def gradient_ready(self, name: str, param: torch.nn.Parameter) -> None:
        """In the thread of the backward: the gradient of one parameter is complete. See `follows_gradients`.

        In synchronised backwards only. An exception ends the backward with it.
        """

    def after_backward(self, missing: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """At the end of each synchronised backward, also of one that raised, then at the next forward.

        Called where gradient_ready() is.

        Args:
            missing: (name, parameter) of the planned parameters that got no gradient in this backward.
        """

    def before_step(self, step: int) -> None:
        """In the training thread, before each watched optimizer steps; `step` steps were taken before."""

    def after_step(self, step: int) -> None:
        """In the training thread, after each optimizer step; `step` includes the one that just ended."""

    def settle(self) -> None:
        """The weights are about to be replaced: finishes or forgets what is under way, and waits for no other rank."""

    def after_consensus(self) -> None:
        """In the training thread, when all ranks were given the same weights."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes over connections of its own, beside those of the communicator from setup."""
        return 0

    @property
    def bytes_received(self) -> int:
        """The same for what has come in."""
        return 0

    def leave(self) -> None:
        """When the wrapper is deleted without close(). Must not wait: any thread, perhaps in a garbage collection."""

    def close(self, *, crashed: bool = False) -> None:
        """When the wrapper is closed, or the process ends. May be called more than once.

        crashed: the process ends by an error; leave without waiting for other ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside `state_fields` and the number of steps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what state_dict returned."""
        if state:
            raise KeyError(f"{type(self).__name__} has no state, got the keys {sorted(state)}")


def whole_chunks(comm: Communicator, block: int) -> int:
    """The alignment of what travels by a two-shot: whole blocks for every rank's chunk; 8 elements, a whole wire row,
    where there are no blocks.
    """
    return comm.chunks * max(block, 8)


def require_codec(where: str, codec: object) -> None:
    """ConfigError unless it is a Codec or None."""
    if codec is not None and not isinstance(codec, Codec):
        raise ConfigError(f"{where}: codec must be a Codec or None, got {codec!r}")
