"""Local SGD: ranks train alone for some steps, then average their weights. With an outer optimizer it is DiLoCo.

Sources: Stich 2018, arXiv:1805.09767. DiLoCo: Douillard et al. 2023, arXiv:2311.08105. Streaming DiLoCo: Douillard et
al. 2025, arXiv:2501.18512. SparseLoCo: Sarfi et al. 2025, arXiv:2508.15706. NoLoCo: Kolehmainen et al. 2025,
arXiv:2506.10911. Between averagings ranks hold different weights: model.consensus() averages them exactly.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer import _C
from gossamer.algorithms.base import (
    Algorithm,
    Question,
    average_with_peers,
    job_with_peers,
    require_codec,
    require_steps,
    whole_chunks,
)
from gossamer.codec import ChunkTopK, Codec, ErrorFeedback, Identity, Int2, Int4, settings_text
from gossamer.collectives import all_reduce
from gossamer.comm import Communicator
from gossamer.engine import Background, BySteps, ByTime, Merge, Unsent, Worker
from gossamer.errors import ConfigError
from gossamer.facts import APART, Messages, Method, Settings, Traffic, Trial
from gossamer.topology import Topology, resolve
from gossamer.torch_private import tree_map, tree_map_only

OuterOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
_BUCKETS_EACH = 2  # about how many buckets a fragment has; each is sent by itself
_ALONE = "lets ranks train alone between averagings, so their weights differ until the next one"


def _diloco(settings: Settings, momentum: float, **more: Any) -> "LocalSGD":
    outer = partial(torch.optim.SGD, lr=0.7, momentum=momentum, nesterov=True)
    return LocalSGD(settings.period, outer, **more)


def _streaming(settings: Settings, momentum: float, fragments: int, delay: int) -> "LocalSGD":
    return _diloco(
        settings, momentum, codec=ErrorFeedback(Int4()), fragments=fragments, delay=delay, merge=0.5
    )


def _noloco(settings: Settings) -> "LocalSGD":
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.5)
    return LocalSGD(settings.period, outer, topology="random_pairs")


def deal(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Deals buckets to fragments, the largest first, each to the smallest fragment. Returns each fragment's numbers."""
    dealt: list[list[int]] = [[] for _ in range(fragments)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        min(dealt, key=lambda own: sum(sizes[each] for each in own)).append(index)
    return [sorted(own) for own in dealt]


class LocalSGD(Algorithm):
    """Every `period` steps: anchor <- outer(anchor, anchor - mean of x), then x <- anchor.

    The anchor is what all ranks had after the last averaging, unless `topology` says otherwise. Without
    `outer_optimizer` it becomes the mean of x. If ranks count their samples (gs.count), the mean is weighted by those
    since the last averaging.

    Args:
        period: optimizer steps between two averagings of a parameter (H). None: 10, or as period_s says.
        period_s: seconds between two averagings, instead of steps. Slow ranks then make fewer steps, and no rank waits
            for them. End such a training by `rounds`, which is equal on all ranks, or let gs.elastic divide epochs.
        outer_optimizer: makes an elementwise optimizer for a list of tensors, whose gradient is the mean change.
            DiLoCo's is functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True).
        codec: the codec of the changes, for example ErrorFeedback(Int4()).
        error_decay: the share, above 0 and at most 1, of what the codec left out that joins the next change. The errors
            are fed back, and the codec is given without ErrorFeedback. With ChunkTopK, 0.95 and no outer momentum it is
            SparseLoCo. None: what ErrorFeedback keeps is sent in full.
        fragments: the number of parts of the model, of about equal size, that take turns within a period. The bytes are
            the same, in smaller portions. Buckets are made small enough for it.
        delay: steps that the mean may take to arrive while training goes on, less than `period`. With `period_s` it
            arrives before the next mean is sent, at the latest.
        lockstep: whether ranks agree on errors and skipped steps after every backward. A GradScaler needs it, because
            it skips steps on single ranks. False: ranks wait for each other only to average.
        merge: with a delay, the share in (0, 1] of the arrived weights. The rest are the rank's weights at that time. 1
            forgets the steps of the delay. Streaming DiLoCo has 0.5.
        topology: whose x the mean is of, in each averaging: a Topology, or its name in gossamer.topology.TOPOLOGIES.
            Each rank then has an anchor and an outer optimizer of its own, and waits for its peers alone. With
            "random_pairs" it is NoLoCo. None: of all ranks, which hold one anchor.
    """

    name = "local_sgd"
    # Trials are short, so their momentum is 0.5. DiLoCo's 0.9 needs more averagings.
    methods: ClassVar[tuple[Method, ...]] = (
        Method(
            "local_sgd",
            lambda settings: LocalSGD(settings.period),
            APART,
            _ALONE,
            "local-sgd.md",
            trial=Trial(periodic=True),
        ),
        Method(
            "diloco",
            lambda settings: _diloco(settings, 0.9),
            APART,
            f"{_ALONE}, which an outer optimizer makes",
            "local-sgd.md",
            trial=Trial(lambda settings: _diloco(settings, 0.5, codec=ErrorFeedback(Int4())), periodic=True),
        ),
        Method(
            "diloco_int2",
            lambda settings: _diloco(settings, 0.9, codec=ErrorFeedback(Int2())),
            APART,
            f"{_ALONE}, which an outer optimizer makes of changes in 2 bits",
            "local-sgd.md",
            trial=Trial(lambda settings: _diloco(settings, 0.5, codec=ErrorFeedback(Int2())), periodic=True),
        ),
        Method(
            "sparse_loco",
            lambda settings: LocalSGD(settings.period, codec=ChunkTopK(), error_decay=0.95),
            APART,
            f"{_ALONE}, and sends 1 in 64 elements of the changes in 2 bits",
            "local-sgd.md",
            trial=Trial(periodic=True),
        ),
        Method(
            "streaming_diloco",
            lambda settings: _streaming(settings, 0.9, min(2, settings.period), min(1, settings.period - 1)),
            APART,
            f"{_ALONE}, whose changes travel in 4 bits beside the training",
            "local-sgd.md",
            trial=Trial(
                lambda settings: _streaming(settings, 0.5, fragments=2, delay=4),
                periodic=True,
                apart=True,
                offset=6,
            ),
        ),
        Method(
            "noloco",
            _noloco,
            APART,
            f"{_ALONE}, with one random rank instead of all",
            "local-sgd.md",
            trial=Trial(periodic=True, apart=True),
        ),
    )
    fields: ClassVar[tuple[str, ...]] = ("weight",)
    state_fields: ClassVar[dict[str, Merge]] = {
        "anchor": Merge.EQUAL,
        "error": Merge.OWED,
        "change": Merge.EQUAL,  # the mean that arrived
    }
    needs_optimizer = True

    def __init__(
        self,
        period: int | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        *,
        period_s: float | None = None,
        codec: Codec | None = None,
        error_decay: float | None = None,
        fragments: int = 1,
        delay: int = 0,
        merge: float = 1.0,
        lockstep: bool = False,
        topology: str | Topology | None = None,
    ) -> None:
        if period_s is None:
            period = 10 if period is None else period
            require_steps("LocalSGD", period=period)
            most: float = period
        else:
            _require_seconds(period_s, period, lockstep)
            most = math.inf
        if not isinstance(fragments, int) or not 1 <= fragments <= most:
            raise ConfigError(f"LocalSGD: fragments must be 1 to the period, {period}, got {fragments!r}")
        if not isinstance(delay, int) or not 0 <= delay < most:
            raise ConfigError(f"LocalSGD: delay must be 0 to less than the period, {period}, got {delay!r}")
        if not 0 < merge <= 1:
            raise ConfigError(f"LocalSGD: merge must be above 0 and at most 1, got {merge!r}")
        require_codec("LocalSGD", codec)
        if error_decay is not None:
            if not 0 < error_decay <= 1:
                raise ConfigError(f"LocalSGD: error_decay must be above 0 and at most 1, got {error_decay!r}")
            if codec is None or codec.feeds_back:
                raise ConfigError(
                    f"LocalSGD: error_decay needs a codec without ErrorFeedback, got codec={codec!r}"
                )
            codec = ErrorFeedback(codec)
        if topology is not None and codec is not None:
            raise ConfigError(
                f"LocalSGD: with a topology ranks send their weights, which no codec fits, got topology={topology!r} "
                f"and codec={codec!r}"
            )
        self.period: int | None = period
        self.period_s: float | None = period_s
        self.outer_optimizer = outer_optimizer
        self.codec = codec
        self.error_decay = error_decay
        self.fragments: int = fragments
        self.delay: int = delay
        self.merge: float = merge
        self.topology: Topology | None = resolve(topology) if topology is not None else None
        self._lockstep = lockstep

    def __repr__(self) -> str:
        outer: Any = self.outer_optimizer
        if outer is not None and hasattr(outer, "__qualname__"):  # a function's own text holds its address
            outer = f"{outer.__module__}.{outer.__qualname__}"
        return settings_text(self, outer_optimizer=outer, lockstep=self._lockstep)

    @property
    def lockstep(self) -> bool:
        return self._lockstep

    @property
    def independent(self) -> bool:
        return not self._lockstep

    @property
    def uneven_steps(self) -> bool:
        return self.period is None

    def block(self) -> int:
        return self.codec.block if self.codec is not None else 1

    def alignment(self, comm: Communicator) -> int:
        return whole_chunks(comm, self.block(), self.codec)

    def bucket_limit(self, model_bytes: int) -> int | None:
        """Limits buckets so that fragments can have about equal sizes."""
        return -(-model_bytes // (_BUCKETS_EACH * self.fragments)) if self.fragments > 1 else None

    def connect(self, worker: Worker) -> None:
        super().connect(worker)
        self._outer: dict[int, torch.optim.Optimizer] = {}  # by bucket: the plan of weights does not change
        self._background = None
        self._arrivals: dict[int, int] = {}  # fragment -> the step at which its mean is taken
        self._again: list[int] = []  # fragments that a group that has ended has not averaged
        self._due: tuple[int, list[int]] = (0, [])  # a step, and the fragments still to be sent after it
        self._periods = (
            BySteps(self.period, self.fragments)
            if self.period is not None
            else ByTime(self.period_s or 0.0, self.fragments)
        )
        self._rounds = 0
        self._samples: list[float | None] = [None] * self.fragments  # counted since each was sent
        self._counts = False
        self._weight = 1.0  # of this rank's change; of the background thread
        # By fragment: this rank's weight in the next mean alone; see weigh_next().
        self._next_weights: list[float | None] = [None] * self.fragments
        self._ask: Callable[[], Question] | None = None  # see survive()
        self._answers: dict[int, list[list[int]]] = {}  # by averaging
        self._alone_until = 0  # see average_alone_until()
        self._before: dict[int, Tensor] = {}  # by bucket: what was unsent when it was last sent
        self._sent: dict[int, float | None] = {}  # by fragment under way: the samples counted for it
        self._last_task: dict[int, int] = {}  # by fragment: of the background
        self._heard: list[list[int]] = []

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        if len(buckets) < self.fragments:
            raise ConfigError(
                f"LocalSGD: {self.fragments} fragments need as many buckets, got {len(buckets)}; the model has too "
                "few parameters"
            )
        self._buckets = buckets
        self._dealt = deal([bucket.numel for bucket in buckets], self.fragments)
        self._background = self._background or Background(comm)
        for bucket in buckets:
            if "anchor" not in bucket.fields:
                anchor = bucket.add_field("anchor")
                anchor.copy_(bucket.flat("weight"))
                if not self._restored:
                    # The anchors are then equal, even if the ranks began with different weights.
                    all_reduce(anchor, op="mean", deterministic=True, group=comm)
            bucket.add_field("change", comm)
            Unsent.by(self.codec, bucket).prepare()
            if self.outer_optimizer is not None and bucket.index not in self._outer:
                self._outer[bucket.index] = self.outer_optimizer([bucket.flat("anchor")])

    @property
    def counts(self) -> bool:
        """Whether ranks count their samples."""
        return self._counts

    @property
    def rounds(self) -> int:
        """The number of averagings that this rank has taken; each fragment counts. Equal on all ranks after each."""
        return self._rounds

    def count(self, samples: float) -> None:
        if self.topology is not None:
            super().count(samples)  # raises
        self._counts = True
        self._samples = [_sum(own, samples) for own in self._samples]

    def after_step(self, step: int) -> None:
        while self.advance(step):
            pass

    def advance(self, step: int) -> bool:
        """Takes or sends one fragment after this step. Returns False if nothing is left to do."""
        if self._again:
            if self._again[0] not in self._arrivals:
                self._send(self._again[0], step)
            self._take(self._again[0])
            del self._again[0]
            return True
        if arrived := [fragment for fragment, arrival in self._arrivals.items() if arrival <= step]:
            self._take(arrived[0])
            return True
        due = self._due_after(step)
        if due and self.period is None and self._arrivals:
            self._take(next(iter(self._arrivals)))
        elif due:
            self._send(due.pop(0), step)
        else:
            return False
        return True

    def _due_after(self, step: int) -> list[int]:
        if self._due[0] != step:
            self._due = step, self._periods.due(step)
        return self._due[1]

    def _buckets_of(self, fragment: int) -> list[_C.Bucket]:
        return [self._buckets[index] for index in self._dealt[fragment]]

    def _send(self, fragment: int, step: int) -> None:
        assert self._background is not None
        averaging = self._rounds + len(self._arrivals)  # the topology's round: equal on all ranks
        self._arrivals[fragment] = step + self.delay
        if averaging < self._alone_until:
            return
        samples = _sum(self._sent.get(fragment), self._samples[fragment])
        self._sent[fragment], self._samples[fragment] = samples, None
        once, self._next_weights[fragment] = self._next_weights[fragment], None
        if self._counts:
            self._background.submit(partial(self._weigh, samples), f"step {step}: {self!r} counts samples")
        elif once is not None:
            self._background.submit(partial(self._weigh, once), f"step {step}: {self!r} weights its ranks")
        for bucket in self._buckets_of(fragment):
            self._keep_unsent(bucket)
            change, what = bucket.flat("change"), f"step {step} {bucket!r}: {self!r}"
            if self.topology is None:
                torch.sub(bucket.flat("anchor"), bucket.flat("weight"), out=change)
                task = partial(self._mean_change, bucket, step)
            else:
                change.copy_(bucket.flat("weight"))
                task = partial(self._change_to_peers, bucket, averaging)
            last = self._background.submit(task, what)
        if once is not None:
            last = self._background.submit(
                self._forget_weight, f"step {step}: {self!r} weights its ranks no more"
            )
        if self._ask is not None:
            answered = self._background.submit(
                partial(self._answer, averaging, self._ask()), f"step {step}: {self!r} asks all ranks"
            )
            if self.topology is None:
                last = answered
        self._last_task[fragment] = last

    def _weigh(self, samples: float | None) -> None:
        """Computes this rank's weight in the next means, from the samples of all ranks."""
        assert self._background is not None
        comm = self._background.comm
        mine = torch.tensor([-1.0 if samples is None else samples], dtype=torch.float64, device=comm.device)
        every = mine.new_empty(comm.size)
        comm.all_gather(every, mine).wait()
        counted = every.tolist()
        if min(counted) < 0:
            texts = [f"rank {rank}: {own if own >= 0 else 'nothing'}" for rank, own in enumerate(counted)]
            raise ConfigError(
                f"count() must be called on every rank between two averagings, or on none, got {', '.join(texts)}"
            )
        total = sum(counted)
        self._weight = counted[comm.rank] * comm.size / total if total else 0.0

    def _forget_weight(self) -> None:
        self._weight = 1.0

    def _mean_change(self, bucket: _C.Bucket, step: int) -> None:
        assert self._background is not None
        comm = self._background.comm
        if self._weight == 0:
            bucket.flat("change").zero_()
        elif self._weight != 1:
            bucket.flat("change").mul_(self._weight)
        if self.error_decay is not None:
            bucket.flat(Unsent.FIELD).mul_(self.error_decay)
        self.reduce_field(bucket, "change", codec=self.codec, deterministic=True, step=step, group=comm)

    def _change_to_peers(self, bucket: _C.Bucket, averaging: int) -> None:
        """Makes the change of x, which is the anchor - the mean of this rank's and its peers' x."""
        assert self._background is not None
        assert self.topology is not None
        change = bucket.flat("change")
        mean = torch.empty_like(change)
        average_with_peers(self.topology, self._background.comm, change, mean, step=averaging)
        torch.sub(bucket.flat("anchor"), mean, out=change)

    def _take(self, fragment: int) -> None:
        assert self._background is not None
        began, averaging = self._periods.clock(), self._rounds
        if averaging < self._alone_until:
            for bucket in self._buckets_of(fragment):
                torch.sub(bucket.flat("anchor"), bucket.flat("weight"), out=bucket.flat("change"))
        else:
            last = self._last_task.pop(fragment, None)  # None: loaded, so nothing is under way
            self._background.wait(last)
        self._periods.arrived(began)
        self._rounds += 1
        # With a topology: what was asked an averaging earlier, which has ended before this rank's peers sent.
        self._heard = self._answers.pop(averaging - (self.topology is not None), [])
        del self._arrivals[fragment]
        self._sent.pop(fragment, None)
        for bucket in self._buckets_of(fragment):
            anchor, change = bucket.flat("anchor"), bucket.flat("change")
            if self.outer_optimizer is None:
                anchor.sub_(change)
            else:
                anchor.grad = change
                self._outer[bucket.index].step()
                anchor.grad = None
            bucket.clear_padding("anchor")
            self._move_to_anchor(bucket)

    def _move_to_anchor(self, bucket: _C.Bucket) -> None:
        bucket.flat("weight").lerp_(bucket.flat("anchor"), self.merge if self.delay else 1.0)

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        if self.period is None:
            raise ConfigError(f"plan: LocalSGD needs a period in steps, got period_s={self.period_s}")
        topology, codec = self.topology, self.codec or Identity()
        jobs = [
            messages.mean(bucket, codec, passes=3)
            if topology is None
            else job_with_peers(topology, bucket.nbytes, messages)
            for bucket in messages.buckets
        ]
        dealt = deal([bucket.numel for bucket in messages.buckets], self.fragments)
        return Traffic(
            in_backward=messages.finite() if self.lockstep else (),
            after=() if self.delay else jobs,
            portions=[[jobs[index] for index in own] for own in dealt] if self.delay else (),
            period=self.period,
            delay=self.delay,
            lockstep=self.lockstep,
        )

    def settle(self) -> None:
        """Waits for the means under way and forgets them: they are of the weights before."""
        if self._background is not None:
            self._background.wait()
        self._arrivals.clear()
        self._again.clear()
        self._sent.clear()

    def after_consensus(self) -> None:
        """Makes the new weights the anchor."""
        for bucket in self._buckets:
            bucket.flat("anchor").copy_(bucket.flat("weight"))

    def after_merge(self) -> None:
        if self.topology is not None:  # the merged anchor is rank 0's
            self.after_consensus()

    def close(self, *, crashed: bool = False) -> None:
        if self._background is not None:
            self._background.close(crashed=crashed)

    # --- in a run whose group changes ---

    def why_not_elastic(self) -> str:
        return f"{self!r} must have lockstep=False" if self.lockstep else ""

    def survive(self, ask: Callable[[], Question]) -> None:
        """Keeps from now on what it takes to send a fragment again in another group.

        Args:
            ask: called when a fragment is sent. What it returns is collective over all ranks, and called on another
                thread at the end of the averaging. `heard` has its result.
        """
        self._ask = ask

    @property
    def heard(self) -> list[list[int]]:
        """What all ranks have said in the averaging that was taken last: see survive().

        With a topology: in the one before, so that no rank waits for all others.
        """
        return self._heard

    def hear_all(self) -> None:
        """Waits until all ranks have said what they say in the averagings that this rank has begun."""
        assert self._background is not None
        self._background.wait()

    def own(self) -> dict[str, Any]:
        """Returns what this rank brings into another group beside `state_fields`. Nothing may run in the background."""
        under_way = [*self._again, *(each for each in self._arrivals if each not in self._again)]
        for bucket in (each for fragment in under_way for each in self._buckets_of(fragment)):
            if bucket.index in self._before:
                bucket.flat(Unsent.FIELD).copy_(self._before[bucket.index])
        return {
            "under_way": under_way,
            "due": (self._due[0], list(self._due[1])),
            "samples": list(self._samples),
            "sent": dict(self._sent),
            "counts": self._counts,
            **self.shared_state(),
        }

    def adopt(self, own: dict[str, Any], *, from_other: bool) -> None:
        """Takes what own() returned on this rank, or on another one whose anchors this rank has."""
        self._again, self._due = list(own["under_way"]), (own["due"][0], list(own["due"][1]))
        self._counts = own["counts"]
        if not from_other:
            self._samples, self._sent = list(own["samples"]), dict(own["sent"])
        elif self._counts:
            self._samples = [0.0] * self.fragments
        self._take_shared(own)

    def follow(self, own: dict[str, Any], other: dict[str, Any]) -> None:
        """Takes what own() returned on another rank, and keeps the samples that this rank has counted. See adopt().

        Args:
            own: what own() returned on this rank, which others have left out of averagings since.
        """
        self.adopt(other, from_other=True)
        counted = [_sum(own["sent"].get(f), samples) for f, samples in enumerate(own["samples"])]
        self._samples = [_sum(samples, more) for samples, more in zip(self._samples, counted, strict=True)]

    def catch_up(self, own: dict[str, Any]) -> None:
        """Takes the averaging that has failed on this rank alone, whose anchors it has now. `own` is another rank's."""
        fragment = self._again.pop(0)
        self._sent.pop(fragment, None)
        self._take_shared(own)
        for bucket in self._buckets_of(fragment):
            if Unsent.FIELD in bucket.fields:
                bucket.flat(Unsent.FIELD).zero_()  # the others have got this rank's message
            self._move_to_anchor(bucket)

    def begin_at_anchors(self) -> None:
        """Makes the anchors the weights."""
        for bucket in self._buckets:
            bucket.flat("weight").copy_(bucket.flat("anchor"))

    def sends_next(self, step: int) -> bool:
        """Returns whether advance() after this step is to send a fragment that was not sent before."""
        takes = self._again or (self.period is None and self._arrivals)
        return not takes and bool(self._due_after(step))

    def hasten(self, step: int) -> None:
        """Makes the next fragment due after this step, if none is under way."""
        is_due = self._due[0] == step and self._due[1]
        if not (self._again or self._arrivals or is_due):
            fragment = self._periods.early(step)
            self._due = step, [fragment]
            if self._counts:  # there may have been no step
                self._samples[fragment] = _sum(self._samples[fragment], 0.0)

    def average_now(self, step: int) -> None:
        """Takes the next fragment before it is due."""
        self.hasten(step)
        if self._again:
            self.advance(step)
            return
        if not self._arrivals:
            self._send(self._due[1].pop(0), step)
        self._take(next(iter(self._arrivals)))

    def weigh_next(self, weight: float) -> None:
        """Weights this rank in the next mean of each fragment. All ranks call it, unless they count samples."""
        self._next_weights = [weight] * self.fragments

    def average_alone_until(self, averaging: int) -> None:
        """With a topology: make the averagings before this number with this rank's own weights alone."""
        self._alone_until = averaging

    def average_all(self, mean: Callable[[list[Tensor]], None]) -> None:
        """With a topology: replaces anchors and outer momenta by their means over all ranks, and moves weights alike.

        After averagings of each rank alone, this makes the averaging of all, if the outer optimizer is linear. Nothing
        may be under way.

        Args:
            mean: averages tensors over the ranks in place. Collective.
        """
        momenta = [
            of_anchor[key]
            for _, outer in sorted(self._outer.items())
            for of_anchor in outer.state.values()
            for key in sorted(of_anchor)
            if isinstance(of_anchor[key], Tensor) and of_anchor[key].dim() == 1
        ]
        moved = [bucket.flat("weight") - bucket.flat("anchor") for bucket in self._buckets]
        mean([*self.anchors, *momenta])
        for bucket, since in zip(self._buckets, moved, strict=True):
            torch.add(bucket.flat("anchor"), since, out=bucket.flat("weight"))

    @property
    def anchors(self) -> list[Tensor]:
        """The anchor of each bucket. Equal on all ranks, unless there is a topology."""
        return [bucket.flat("anchor") for bucket in self._buckets]

    def _keep_unsent(self, bucket: _C.Bucket) -> None:
        if self._ask is None or Unsent.FIELD not in bucket.fields:
            return
        unsent = bucket.flat(Unsent.FIELD)
        if bucket.index not in self._before:
            self._before[bucket.index] = torch.empty_like(unsent)
        self._before[bucket.index].copy_(unsent)

    def _answer(self, averaging: int, question: Question) -> None:
        assert self._background is not None
        self._answers[averaging] = question(self._background.comm)

    def shared_state(self, begun: Iterable[int] = ()) -> dict[str, Any]:
        """See Algorithm. `begun` is of no use here."""
        outer = {
            index: tree_map_only(Tensor, Tensor.clone, optimizer.state_dict())
            for index, optimizer in self._outer.items()
        }
        return {"outer": outer, "rounds": self._rounds, "next": self._periods.next}

    def _take_shared(self, state: dict[str, Any]) -> None:
        self._rounds = state.get("rounds", 0)
        self._periods.next = state.get("next", 0)
        for bucket in self._buckets:
            if bucket.index in state["outer"]:
                outer = tree_map(partial(_fitted, numel=bucket.numel), state["outer"][bucket.index])
                self._outer[bucket.index].load_state_dict(outer)

    def state_dict(self) -> dict[str, Any]:
        if self._background is not None:
            self._background.wait()
        return {"arrivals": dict(self._arrivals), "samples": list(self._samples), **self.shared_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._arrivals = dict(state["arrivals"])
        self._samples = list(state.get("samples", self._samples))
        self._counts = any(samples is not None for samples in self._samples)
        self._take_shared(state)


def _sum(samples: float | None, more: float | None) -> float | None:
    """Adds what has been counted; None: nothing has."""
    return samples if more is None else (samples or 0.0) + more


def _fitted(value: Any, *, numel: int) -> Any:
    """Gives what an outer optimizer keeps of each element the size of a bucket, whose padding depends on the ranks."""
    if not isinstance(value, Tensor) or value.dim() != 1 or len(value) == numel:
        return value
    fitted = value.new_zeros(numel)
    common = min(numel, len(value))
    fitted[:common] = value[:common]
    return fitted


def _require_seconds(period_s: float, period: int | None, lockstep: bool) -> None:
    if not isinstance(period_s, (int, float)) or not 0 < period_s < math.inf:
        raise ConfigError(f"LocalSGD: period_s must be a positive number of seconds, got {period_s!r}")
    if period is not None:
        raise ConfigError(
            f"LocalSGD: period and period_s must not both be given, got {period!r} and {period_s!r}"
        )
    if lockstep:
        raise ConfigError(
            f"LocalSGD: lockstep=True needs equally many steps on all ranks, got period_s={period_s!r}; give a period "
            f"in steps"
        )
