"""The buckets of one model: planned, built, and put into the native engine with the work that is done on each.

They are planned at wrap, again by the order in which the first gradients arrived, when parameters become trainable,
when a state is loaded, and by a tuner. Owned by engine.py.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from gossamer import _C
from gossamer.comm import Communicator
from gossamer.engine.agree import require_equal
from gossamer.engine.plan import plan_buckets
from gossamer.engine.state import restore_fields, save_fields
from gossamer.engine.worker import Moments, bucket_ready_of

_log = logging.getLogger("gossamer")


class Buckets:
    """Iterates over the native buckets, in the order in which they are sent.

    Args:
        params: all parameters that the ranks share, by name.
        bucket_bytes, first_bucket_bytes: see plan_buckets.
        last: names of parameters that travel after all others.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        algorithm: Moments,
        *,
        comm: Communicator,
        control: Communicator,
        bucket_bytes: int,
        first_bucket_bytes: int | Sequence[int],
        last: Collection[str] = (),
    ) -> None:
        self._names, self._params = list(params), list(params.values())
        self._algorithm, self._comm, self._control = algorithm, comm, control
        self.bucket_bytes, self._first_bucket_bytes = bucket_bytes, first_bucket_bytes
        self._last = {index for index, name in enumerate(self._names) if name in last}
        self._order: list[int] = []
        self._native: Any = None
        self._timed = False
        self.all: list[_C.Bucket] = []
        self.clocks: list[Any] = []  # of each bucket's work, while they are timed

    def connect(self, native: Any) -> None:
        """Called once, before anything is planned."""
        self._native = native

    @property
    def names(self) -> list[list[str]]:
        """The plan: the parameters of each bucket."""
        return [list(bucket.names) for bucket in self.all]

    def arrive(self, order: list[int]) -> None:
        """Plans for gradients that arrive in this order. Weights do not arrive: their plan stays."""
        self._order = order
        if not self.all or "grad" in self._algorithm.fields:
            self._install(self._plan(order, self.bucket_bytes))

    def planned(self, bucket_bytes: int) -> list[list[str]]:
        """The parameters of each bucket, if buckets were of this size."""
        return [[self._names[i] for i in indices] for indices in self._plan(self._order, bucket_bytes)]

    def rebuild(self, bucket_bytes: int, *, timed: bool = False) -> None:
        """Buckets of this size, and what the algorithm does with each now. `timed`: `clocks` tell how long it takes."""
        self.bucket_bytes, self._timed = bucket_bytes, timed
        self._install(self._plan(self._order, bucket_bytes), rebuild=True)

    def load(self, names: Sequence[Sequence[str]], *, rebuild: bool) -> None:
        """Takes the plan of another run; `rebuild`: even if it is this one's too."""
        self._timed = False
        number = {name: index for index, name in enumerate(self._names)}
        plan = [[number[name] for name in bucket] for bucket in names]
        self._order = [index for bucket in plan for index in bucket]
        self._install(plan, rebuild=rebuild)

    def append_late(self) -> None:
        """Called on every rank at the end of a backward when some rank trains parameters outside the plan."""
        late = self._native.hooks.survey()
        lines = [f"{self._names[i]} is trainable now" for i in late]
        require_equal(self._control, lines, "the set of parameters that became trainable")
        self._order = [*self._order, *late[::-1]]
        for indices in self._plan(late[::-1], self.bucket_bytes):
            self._append(indices)
        self._algorithm.setup(self._comm, self.all)

    def adopt_weights(self) -> None:
        """The flat memory again holds the weights, also where somebody gave a parameter other memory."""
        if "weight" in self._algorithm.fields:
            for bucket in self.all:
                bucket.adopt_weights()

    def _plan(self, order: list[int], bucket_bytes: int) -> list[list[int]]:
        return plan_buckets(
            self._params,
            order,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=self._first_bucket_bytes,
            last=self._last,
            group_of=lambda index: self._algorithm.group_of(self._names[index], self._params[index]),
            limit_of=self._algorithm.bucket_limit,
        )

    def _install(self, plan: list[list[int]], *, rebuild: bool = False) -> None:
        if not rebuild and [bucket.param_indices for bucket in self.all] == plan:
            return
        kept = save_fields(self.all, self._algorithm.state_fields)
        self._native.clear_buckets()
        self.all, self.clocks = [], []
        # One at a time: the old flat memory goes as the gradients in it move.
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
        if "weight" in self._algorithm.fields:
            bucket.adopt_weights()
        self.all = [*self.all, bucket]
        work = self._work_of(bucket)
        if self._timed:
            work = _C.TimedWork(work)
            self.clocks.append(work)
        self._native.append_bucket(bucket, work)

    def _work_of(self, bucket: _C.Bucket) -> Any:
        algorithm = self._algorithm
        work = algorithm.native_work(bucket)
        if work is None and "grad" in algorithm.fields:
            work = _C.PythonWork(bucket_ready_of(algorithm, self._comm))
        return work if work is not None else _C.AgreeOnFinite() if algorithm.lockstep else _C.NoWork()
