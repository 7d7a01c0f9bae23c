"""The buckets of one model: plans them, builds them, and gives them to the native engine with the work for each.

A plan is made when the model is wrapped; after the first backward, from the order in which gradients arrived; when
parameters become trainable; when a state is loaded; and by the tuner. engine.py owns one Buckets.
"""

import logging
import weakref
from collections.abc import Callable, Sequence

from gossamer import _C
from gossamer.comm import Communicator
from gossamer.engine.admission import overlap_text, overlapping
from gossamer.engine.agree import require_equal
from gossamer.engine.algorithm import Algorithm
from gossamer.engine.parts import Parts
from gossamer.engine.plan import Sizes, plan_buckets
from gossamer.engine.state import restore_fields, save_fields
from gossamer.engine.watching import watch_of
from gossamer.engine.worker import with_context
from gossamer.errors import ConfigError
from gossamer.observe.stall import Limits, Watch

_log = logging.getLogger("gossamer")


class Buckets:
    """The plan of one model, and its native buckets.

    Attributes:
        all: the buckets, in the order in which they are sent.
        clocks: the timed work of each bucket, while they are timed.
        bucket_bytes: the size at which a bucket closes.
        native: the native engine. The engine sets it before the first plan.
    """

    native: _C.Engine

    def __init__(self, parts: Parts, sizes: Sizes) -> None:
        self._names, self._params = list(parts.named), list(parts.named.values())
        self._algorithm, self._comm, self._control = parts.algorithm, parts.comm, parts.control
        self._sizes = sizes
        self.bucket_bytes: int = sizes.bucket_bytes
        self._last = {index for index, name in enumerate(self._names) if name in sizes.last}
        self._order: list[int] = []
        self._timed = False
        self.all: list[_C.Bucket] = []
        self.clocks: list[_C.TimedWork] = []

    @property
    def names(self) -> list[list[str]]:
        """The names of the parameters of each bucket."""
        return [list(bucket.names) for bucket in self.all]

    def arrive(self, order: list[int]) -> None:
        """Plan for gradients that arrive in this order. The plan of an algorithm without gradients stays."""
        self._order = order
        if not self.all or "grad" in self._algorithm.fields:
            self._install(self._plan(order, self.bucket_bytes))

    def planned(self, bucket_bytes: int) -> list[list[str]]:
        """Return the names of the parameters of each bucket, for buckets of this size."""
        return [[self._names[i] for i in indices] for indices in self._plan(self._order, bucket_bytes)]

    def rebuild(self, bucket_bytes: int, *, timed: bool = False) -> None:
        """Plan buckets of this size, and ask the algorithm again for its work on each.

        Args:
            timed: measure the time of each bucket's work in `clocks`.
        """
        self.bucket_bytes = bucket_bytes
        self._timed = timed
        self._install(self._plan(self._order, bucket_bytes), rebuild=True)

    def load(self, names: Sequence[Sequence[str]], *, rebuild: bool) -> None:
        """Take the plan of another run.

        Args:
            names: the parameters of each bucket.
            rebuild: build the buckets anew even if the plan is the current one.
        """
        self._timed = False
        number = {name: index for index, name in enumerate(self._names)}
        plan = [[number[name] for name in bucket] for bucket in names]
        self._order = [index for bucket in plan for index in bucket]
        self._install(plan, rebuild=rebuild)

    def append_late(self) -> None:
        """Add buckets for parameters that became trainable. Called on every rank, at the end of a backward."""
        late = self.native.hooks.survey()
        lines = [f"{self._names[i]} is trainable now" for i in late]
        require_equal(self._control, lines, "the set of parameters that became trainable")
        self._order = [*self._order, *late[::-1]]
        for indices in self._plan(late[::-1], self.bucket_bytes):
            self._append(indices)
        self._algorithm.setup(self._comm, self.all)

    def adopt_weights(self) -> None:
        """Move weights that lie elsewhere, because a parameter was given other memory, back into the buckets.

        Called before each moment of a step at which the algorithm may use them.

        Raises:
            ConfigError: two parameters were given memory in common.
        """
        if any(bucket.strayed for bucket in self.all):
            if pair := overlapping(zip(self._names, self._params, strict=True)):
                raise ConfigError(f"engine: {overlap_text(self._algorithm, *pair)}")
            for bucket in self.all:
                bucket.adopt_weights()

    def open_watch(self, limits: Limits | None) -> Watch:
        """Open the stall watch of the native engine. It keeps no plan alive. All ranks open theirs in one order."""
        plan = weakref.ref(self)

        def describe(bucket: int) -> str:
            known = plan()
            found = known.all[bucket : bucket + 1] if known is not None else []
            return repr(found[0]) if found else f"bucket {bucket}"

        return watch_of(self.native, self._control, limits, describe=describe, unit="step")

    def _plan(self, order: list[int], bucket_bytes: int) -> list[list[int]]:
        return plan_buckets(
            self._params,
            order,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=self._sizes.first_bucket_bytes,
            last=self._last,
            group_of=lambda index: self._algorithm.group_of(self._names[index], self._params[index]),
            limit_of=self._algorithm.bucket_limit,
        )

    def _install(self, plan: list[list[int]], *, rebuild: bool = False) -> None:
        if not rebuild and [bucket.param_indices for bucket in self.all] == plan:
            return
        kept = save_fields(self.all, self._algorithm.state_fields)
        self.native.clear_buckets()
        self.all, self.clocks = [], []
        # One bucket at a time, so that old flat memory is freed as its gradients move.
        for indices in plan:
            self._append(indices)
        restore_fields(self.all, kept)
        self._algorithm.setup(self._comm, self.all)
        _log.info("rank %d: %d parameters in %s", self._comm.rank, len(self._params), self.all)

    def _append(self, indices: list[int]) -> None:
        params, names = [self._params[i] for i in indices], [self._names[i] for i in indices]
        block, alignment = self._algorithm.block(), self._algorithm.alignment(self._comm)
        placement = _C.Placement.in_turn(params, block, alignment)
        bucket = _C.Bucket(len(self.all), indices, params, names, placement)
        for field in self._algorithm.fields:
            bucket.add_field(field, self._comm)
        bucket.adopt_weights()
        self.all = [*self.all, bucket]
        work = self._work_of(bucket)
        if self._timed:
            work = _C.TimedWork(work)
            self.clocks.append(work)
        self.native.append_bucket(bucket, work)

    def _work_of(self, bucket: _C.Bucket) -> _C.BucketWork:
        if (work := self._algorithm.native_work(bucket)) is not None:
            return work
        if "grad" in self._algorithm.fields:
            return _C.PythonWork(_bucket_ready_of(self._algorithm, self._comm))
        return _C.AgreeOnFinite() if self._algorithm.lockstep else _C.NoWork()


def _bucket_ready_of(algorithm: Algorithm, comm: Communicator) -> Callable[[_C.Bucket], None]:
    # It holds no engine: the worker thread must not drop the last reference to the engine that owns it.
    def call(bucket: _C.Bucket) -> None:
        what = f"step {bucket.step} {bucket!r}: {algorithm!r}.bucket_ready raised"
        with_context(lambda: algorithm.bucket_ready(bucket), what, comm)()

    return call
