"""What an algorithm is: the moments of a step at which it may act. By default it does nothing at any of them.

An algorithm reads like its paper, as straight blocking code. The engine calls it at the right moment, on the right
thread, in the same order on every rank. See docs/adding-an-algorithm.md. The algorithms are in gossamer.algorithms.
"""

import contextlib
from abc import ABC
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from gossamer import _C
from gossamer.codec import Codec, settings_text
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.engine.background import Background
from gossamer.engine.merging import Merge
from gossamer.engine.unsent import Unsent
from gossamer.engine.worker import Worker
from gossamer.errors import ConfigError
from gossamer.facts import Messages, Method, Traffic


class Algorithm(ABC):
    """The base class. A subclass overrides the moments that it needs, and has a line in the table of names.

    Either `native_work` returns an object of gossamer._C that does a bucket's work without the GIL, or `bucket_ready`
    does it in Python. Ranks compare their algorithms' repr, which shows the public attributes.
    """

    #: The name that DataParallel(algorithm="...") takes.
    name: ClassVar[str]

    #: The ways to use the algorithm that the planner, the benchmarks and the hooks offer by name.
    methods: ClassVar[tuple[Method, ...]] = ()

    #: The flat memories of every bucket that the group can send from: "grad" for algorithms that send gradients,
    #: "weight" for algorithms that send parameters. The parameters are then views of it.
    fields: ClassVar[tuple[str, ...]] = ("grad",)

    #: The algorithm's own fields that a new bucket plan and a checkpoint must keep, and what becomes of each when
    #: another number of ranks resumes. A tuple of names says nothing of that: then the number must stay.
    state_fields: ClassVar[Mapping[str, Merge] | tuple[str, ...]] = ()

    #: Whether DataParallel must get the optimizer, because the algorithm counts steps.
    needs_optimizer: ClassVar[bool] = False

    #: The only class of optimizer that the algorithm works with. None: any class.
    optimizer_class: ClassVar[type[torch.optim.Optimizer] | None] = None

    #: Whether the bits of the results depend neither on bucket sizes nor on the backend.
    deterministic: bool = False

    #: Whether a rank without batches may go on with zero gradients, which model.join() needs. True if the ranks
    #: exchange only gradients, for their mean (or sum), in native_work or bucket_ready.
    uneven_inputs: ClassVar[bool] = False

    #: Whether the mean of the gradients may be weighted by the samples of each rank, by count(). True if the ranks send
    #: nothing but gradients, for their mean.
    weighs_gradients: ClassVar[bool] = False

    #: Whether gradient_ready() and after_backward() are called. Only for algorithms that are never in lockstep.
    follows_gradients: ClassVar[bool] = False

    #: Whether gradients are replaced by their mean over the ranks. False: by their sum.
    average: bool = True

    _worker: Worker | None = None
    _restored = False  # see restored()
    _alone = False  # see alone
    _survives = False  # see survive_losses()
    _background: Background | None = None  # of an algorithm whose messages no backward waits for

    @property
    def field_rules(self) -> Mapping[str, Merge]:
        """The rules of `state_fields`; empty if it says none."""
        return self.state_fields if isinstance(self.state_fields, Mapping) else {}

    @property
    def own_weights(self) -> bool:
        """Whether ranks may hold different weights between steps, so that each must save its own."""
        return "weight" in self.fields

    @property
    def lockstep(self) -> bool:
        """Whether the ranks agree at the end of each synchronised backward. All ranks then wait for the slowest.

        In lockstep all ranks learn of an error on one rank, of parameters that some ranks did not use, and of different
        numbers of steps. False for algorithms whose ranks train without waiting for each other.
        """
        return True

    @property
    def independent(self) -> bool:
        """Whether some steps are not in lockstep, so that a face must not add a collective to each step."""
        return False

    @property
    def uneven_steps(self) -> bool:
        """Whether ranks may make different numbers of steps."""
        return False

    def __repr__(self) -> str:
        return settings_text(self)

    def connect(self, worker: Worker) -> None:
        """Called first, when a model is wrapped. A subclass sets up here, not in __init__, what belongs to one run.

        Raises:
            ConfigError: the object serves another model that is still wrapped.
        """
        if self.serves:
            raise ConfigError(
                f"{type(self).__name__}: this object serves another wrapped model; make one for each model"
            )
        if (
            self._background is not None
        ):  # of a model that was deleted; all ranks have submitted the same by now
            self._background.drain()
        self._worker = worker

    @property
    def serves(self) -> bool:
        """Whether the object serves a model that is still wrapped."""
        return self._worker is not None and self._worker.alive

    @classmethod
    def make_optimizer(
        cls, params: Iterable[torch.Tensor], *, lr: float, warmup_steps: int
    ) -> torch.optim.Optimizer:
        """Makes an optimizer that the algorithm works with: AdamW if it works with any.

        Args:
            warmup_steps: the number of first, exact steps of an algorithm that has a warm-up.
        """
        return torch.optim.AdamW(params, lr=lr, fused=True)

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        """Returns what the algorithm sends and computes in a step, for the planner.

        Args:
            messages: the buckets of a model, and the price of each message.
            warm: False asks about a step of the warm-up, for an algorithm that has one.

        Raises:
            ConfigError: the algorithm does not define it.
        """
        raise ConfigError(
            f"plan: {type(self).__name__} must define traffic(messages); see docs/adding-an-algorithm.md"
        )

    def for_any_buckets(self) -> "Algorithm":
        """Returns an algorithm with the same settings whose result does not depend on which parameters share a bucket.

        The hooks for stock DDP need it, because DDP plans its buckets itself.

        Raises:
            ConfigError: there is no such algorithm, so this one cannot be a hook.
        """
        raise ConfigError(f"hooks: {self!r} cannot be a hook, because it does not define for_any_buckets()")

    def use_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Called before connect(), with the optimizers that DataParallel was given.

        Raises:
            ConfigError: they are not one object of the algorithm's optimizer_class, if it has one.
        """
        kind = self.optimizer_class
        if kind is not None and (len(optimizers) != 1 or not isinstance(optimizers[0], kind)):
            raise ConfigError(
                f"{type(self).__name__}: the optimizer must be one {kind.__name__}, got "
                f"{[type(optimizer).__name__ for optimizer in optimizers]}"
            )

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps taken so far. Any thread may read it."""
        assert self._worker is not None
        return self._worker.optimizer_steps

    def submit(self, bucket: _C.Bucket, task: Callable[[_C.Bucket], None]) -> None:
        """Queues task(bucket) for the engine's worker.

        It returns at once, or over NCCL once the task has queued its operations. Every rank submits the same tasks in
        the same order. wait(), or the backward that ends next, raises their error.
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
        """Calls all_reduce on a bucket's field, in place, together with what is Unsent of it. Blocking, collective.

        A stochastic codec draws other random numbers in each `step`.
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
        """Waits until all submitted tasks are done. Raises their error."""
        assert self._worker is not None
        self._worker.wait()

    def block(self) -> int:
        """Returns a number of elements. Parameters start at its multiples (and at those of 64 bytes) in flat memory."""
        return 1

    def alignment(self, comm: Communicator) -> int:
        """Returns a number of elements. Bucket sizes are padded to a multiple of it."""
        return 1

    def group_of(self, name: str, param: torch.Tensor) -> Hashable:
        """Returns the group of a parameter. Parameters of different groups never share a bucket."""
        return None

    def bucket_limit(self, model_bytes: int) -> int | None:
        """Returns the most bytes of a bucket, in a model of `model_bytes`. None: as the user says."""
        return None

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        """Called when a model is wrapped, and again with the new `buckets` whenever the plan changes.

        bucket.add_field(name) returns memory [numel] for state. It holds zeros if the field is new.
        """

    def native_work(self, bucket: _C.Bucket) -> _C.BucketWork | None:
        """Returns the native work of a bucket. None: bucket_ready does the work."""
        return None

    def codec_choices(self, extra: Sequence[Codec | None]) -> list[Codec | None]:
        """Returns the codecs that tuning may try, besides the one in use. None stands for exact sending.

        Called before the buckets are made.

        Args:
            extra: codecs that the user allows, besides codecs that lose no more than the algorithm's own.

        Raises:
            ConfigError: the algorithm cannot take one of `extra`.
        """
        if extra:
            raise ConfigError(f"autotune: {self!r} does not let codecs be chosen, got {list(extra)!r}")
        return []

    def codec_of(self, bucket: _C.Bucket) -> Codec | None:
        """Returns the codec of a bucket's gradients, for reports. None: they are sent exactly, or not at all."""
        return None

    def use_codecs(self, codecs: Mapping[str, Codec | None]) -> None:
        """Sets codecs by parameter name, from the next setup on. Other parameters keep the algorithm's own choice."""
        if codecs:
            raise ConfigError(f"{self!r} does not let codecs be chosen, got {dict(codecs)!r}")

    def before_forward(self, step: int) -> None:
        """Called in the training thread before each forward that records gradients. `step`: optimizer steps so far.

        Not before one that the wrapper does not see, such as that of model.module, nor in eval mode: an evaluation may
        have other weights in the model for a while.
        """

    def before_backward(self, step: int) -> None:
        """Called when a synchronised backward begins, in its thread, before any bucket is ready."""

    def bucket_ready(self, bucket: _C.Bucket) -> None:
        """Called on the engine's worker thread, in bucket order, when all gradients of `bucket` are in place.

        `bucket.flat()` is the flat gradient [numel], to be changed in place. It may block, because backward goes on.
        Called only if `fields` has "grad".
        """
        raise NotImplementedError(f"{type(self).__name__} must define native_work or bucket_ready")

    def gradient_ready(self, name: str, param: torch.nn.Parameter) -> None:
        """Called in the thread of a synchronised backward when the gradient of a parameter is complete.

        See `follows_gradients`. An exception here ends the backward, which raises it.
        """

    def after_backward(self, missing: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Called at the end of each synchronised backward; if the backward raised, at the next forward.

        See `follows_gradients`.

        Args:
            missing: (name, parameter) of the planned parameters that got no gradient in this backward.
        """

    def count(self, samples: float) -> None:
        """Called by model.count() unless `weighs_gradients`: this rank has seen so many samples more.

        Raises:
            ConfigError: the algorithm does not weight by samples.
        """
        raise ConfigError(
            f"count: {self!r} does not weight ranks by their samples; train by gradient_allreduce, bytegrad, powersgd "
            f"or local_sgd, whose means are weighted, and with average=True"
        )

    def before_step(self, step: int) -> None:
        """Called in the training thread before each watched optimizer steps. `step` steps were taken before."""

    def after_step(self, step: int) -> None:
        """Called in the training thread after each optimizer step. `step` includes the step that just ended."""

    def settle(self) -> None:
        """Called before the weights are replaced. Ends or forgets what is under way, and waits for no other rank."""

    def after_consensus(self) -> None:
        """Called in the training thread when all ranks have got the same weights."""

    @property
    def bytes_sent(self) -> int:
        """The payload bytes sent over the algorithm's own connections. The communicator of setup() is not counted."""
        return self._background.comm.bytes_sent if self._background is not None else 0

    @property
    def bytes_received(self) -> int:
        """The payload bytes received over the algorithm's own connections."""
        return self._background.comm.bytes_received if self._background is not None else 0

    def leave(self) -> None:
        """Called when the wrapper is deleted without close(), or another one takes the model over. Must not wait.

        Any thread may call it, also in a garbage collection. The other ranks may still wait for what was submitted to
        the background, so that runs to its end.
        """
        background = self._background
        if background is None:
            self.close()
        else:
            background.finish()

    def close(self, *, crashed: bool = False) -> None:
        """Called when the wrapper is closed or the process ends, perhaps more than once.

        Args:
            crashed: the process ends by an error. Leave without waiting for other ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs besides `state_fields` and the number of steps."""
        return {}

    def why_not_elastic(self) -> str:
        """Returns why the group cannot change while gs.elastic() trains; empty if it can."""
        if self.uneven_inputs and self.lockstep and set(self.state_fields) <= {"error"}:
            return ""
        return f"{self!r} keeps more on each rank than gradients, and does not say how the ranks agree on it again"

    def survive_losses(self) -> None:
        """Called when the group may lose members in the middle of a step, after which another group goes on."""
        self._survives = True

    @property
    def alone(self) -> bool:
        """Whether the algorithm must send nothing but gradients now.

        It begins when the group has lost a member, and ends when the ranks that are left have averaged their weights
        and states_alike().
        """
        return self._alone

    @alone.setter
    def alone(self, alone: bool) -> None:
        self._alone = alone

    def averages_gradients(self, step: int) -> bool:
        """Returns whether all ranks get one gradient in the step that follows `step` others."""
        return "grad" in self.fields

    def states_alike(self) -> list[torch.Tensor]:
        """Returns the tensors, besides weights and fields, that ranks hold alike when they hold equal weights."""
        return []

    def shared_state(self, begun: Iterable[int] = ()) -> dict[str, Any]:
        """Returns what all ranks hold alike besides weights, for this rank or another one in the next group.

        Args:
            begun: indices of the buckets on which a backward has begun that has failed: as it was before them.
        """
        return {}

    def take_shared_state(self, state: dict[str, Any]) -> None:
        """Takes what shared_state() returned, perhaps on another rank."""

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Surrounds connect() and setup() where all that ranks hold alike is brought to them afterwards.

        setup() then need not make it, and finds `_restored` set.
        """
        self._restored = True
        try:
            yield
        finally:
            self._restored = False

    def lose_group(self) -> None:
        """Ends all waits for other ranks in connections of the algorithm's own. Any thread may call it."""
        if self._background is not None:
            self._background.comm.announce_failure()

    def owed_by(self, comm: Communicator) -> int:
        """Returns the number of ranks whose memory of what is unsent goes into the sum of an element."""
        return len(comm.hosts) if isinstance(comm, _C.ByHosts) else comm.size

    def after_merge(self) -> None:
        """Called at the end of a load, if another number of ranks saved. All ranks hold equal weights then."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what state_dict() returned. If another number of ranks saved: what it returned on their rank 0."""
        if state:
            raise KeyError(f"{type(self).__name__} has no state, got the keys {sorted(state)}")
