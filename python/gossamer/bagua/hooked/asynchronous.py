"""Asynchronous averaging of a bucket of weights, in rounds that run while the model trains.

BaguaBucket.append_asynchronous_model_average_op() returns it, for algorithms in Bagua's hooks. The built-in algorithm
gossamer.AsyncModelAverage changes weights in the training thread alone, so it needs no lock.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gossamer.bagua.hooked.operations import require_peers
from gossamer.bagua.hooked.values import BucketValues
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.errors import ConfigError, GossamerError

_WHAT = "append_asynchronous_model_average_op"


class AsynchronousModelAverage:
    """One round: x = mean of s + (x - s). s is a copy of x that the round makes at its beginning.

    The round keeps changes that were made to x meanwhile. It waits before it changes x while lock_weight() holds x, and
    while an optimizer that with_bagua() was given steps. There is no round once all ranks have aborted; a rank that has
    aborted takes part until then.

    Raises:
        ConfigError: another mode than "all"; a bucket without flat memory, or of a dtype that has no mean.
    """

    def __init__(self, bucket: BucketValues, comm: Communicator, peer_selection_mode: str) -> None:
        require_peers(_WHAT, peer_selection_mode, "all")
        if not bucket.flatten:
            raise ConfigError(
                f"{_WHAT}: {bucket!r} must be made with flatten=True, got {bucket.flatten!r}; rounds change "
                f"the weights in place while the model trains"
            )
        dtype = bucket.effective()[0].dtype
        if not dtype.is_floating_point:
            raise ConfigError(f"{_WHAT}: {bucket!r} must be of a floating-point dtype, got {dtype}")
        self._bucket, self._comm = bucket, comm
        self._snapshot, self._mean = bucket.flattened_tensor(), bucket.flattened_tensor()
        on_gpu = self._mean.is_cuda
        self._stream = torch.cuda.current_stream(self._mean.device) if on_gpu else None  # of the training
        self._changed = threading.Condition()  # guards _holders; held while the weights are read or written
        self._holders: set[str] = set()
        self._aborting, self._running = False, True
        self._failure: Exception | None = None

    def lock_weight(self) -> None:
        """Keeps rounds from changing the weights, until unlock_weight(). A second call has no effect.

        Raises:
            GossamerError: a round has failed.
        """
        if self._failure is not None:
            raise GossamerError(
                f"lock_weight: a round of {self._bucket!r} failed, and its ranks train apart: {self._failure}"
            ) from self._failure
        self.hold("forward and backward")

    def unlock_weight(self) -> None:
        """Lets rounds change the weights again. Any thread may call it, also where nothing is locked."""
        self.let_go("forward and backward")

    def abort(self) -> None:
        """Tells the other ranks, in the next round, that this rank wants no more rounds.

        When all ranks have said so, that round averages nothing, and get_status() becomes False on all of them. Call it
        in the training thread, between steps. It lets go of the weights too, so that a round under way can end.
        """
        self._aborting = True
        self.let_go()

    def reset(self) -> None:
        """Takes abort() back. Call it on all ranks, while no rank runs a round."""
        self._aborting, self._running, self._failure = False, True, None

    def get_status(self) -> bool:
        """False when all ranks have aborted. It becomes False on all ranks after the same round."""
        return self._running

    def __call__(self) -> None:
        try:
            aborted = torch.tensor([float(self._aborting)], device=self._mean.device)
            all_reduce(aborted, group=self._comm)
            if int(aborted.item()) == self._comm.size:
                self._running = False
            else:
                self._round()
        except Exception as error:
            self._failure = error
            raise

    def hold(self, holder: str) -> None:
        """Keeps rounds from changing the weights until let_go() of the same holder."""
        with self._changed:
            self._holders.add(holder)

    def let_go(self, holder: str | None = None) -> None:
        """Ends hold() of this holder; None: of all holders."""
        with self._changed:
            self._holders -= self._holders if holder is None else {holder}
            self._changed.notify_all()

    def _round(self) -> None:
        with self._weights(lambda: "step" not in self._holders) as weights:
            self._snapshot.copy_(weights)
            self._mean.copy_(weights)
        all_reduce(self._mean, op="mean", deterministic=True, group=self._comm)
        with self._weights(lambda: not self._holders) as weights:
            # In this order, and written once: if x was not changed, it becomes the mean, the same bits on every rank.
            torch.sub(weights, self._snapshot, out=self._snapshot)
            weights.copy_(self._snapshot.add_(self._mean))

    @contextmanager
    def _weights(self, may: Callable[[], bool]) -> Iterator[Tensor]:
        """Waits until may() is True, and yields the flat weights. hold() and let_go() wait meanwhile."""
        with self._changed:
            self._changed.wait_for(may)
            flat = self._bucket.flat_memory()
            if flat is None:
                raise ConfigError(
                    f"{_WHAT}: the weights of {self._bucket!r} must stay in its flat memory, but they have been moved; "
                    f"call with_bagua after moving the model"
                )
            if self._stream is None:
                yield flat
                return
            # In the order of the training stream's kernels, so that its host thread need not wait.
            own = torch.cuda.current_stream(flat.device)
            self._stream.wait_stream(own)
            with torch.cuda.stream(self._stream):
                yield flat
            own.wait_stream(self._stream)
