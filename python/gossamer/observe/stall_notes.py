# What the ranks of a group tell each other of a stall, through the group's store: a counter that the ranks that wait
# move on, and a note of each rank, written only when the counter has moved. While nobody waits: one short request per
# look. exchange() may block, as whoever hosts the store may be stopped; it has a thread of its own. Used by stall.py.
"""``Notes``: the notice board of a stall, and what is known of the other ranks from it."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from gossamer import _C
from gossamer.observe import stall_text

Note = dict[str, Any]
NO_BUCKET, BEFORE_BUCKETS = -1, -2
# Of activity(): the names of operations, a caller that waits for the worker, and what has not begun.
_OPERATIONS = {"all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast", "exchange"}
_OPERATIONS |= {"meet", "sum_in_place"}
_STANDS_STILL, _QUEUED = "wait", "queued: "


class Wait(NamedTuple):
    """Something that this rank waits for."""

    what: str
    bucket: int  # its number in the plan; NO_BUCKET, or BEFORE_BUCKETS of a step
    since: float  # Unix time
    doing: str = ""  # what of it is under way

    def is_passed_in(self, waits: Sequence[Sequence[Any]]) -> bool:
        """Whether who waits for these, in the same step, has come to this."""
        return any(
            what == self.what or (self.bucket != NO_BUCKET and bucket > self.bucket)
            for what, bucket, *_ in waits
        )


class Notes:
    """Notes of the ranks of one group.

    Args:
        store: a torch.distributed store of all its ranks, with a prefix that nothing else uses; None: there is none.
        rank, size: in the group.
        patience_s: seconds after which a rank that does not answer is said to be silent.
    """

    def __init__(self, store: Any, rank: int, size: int, *, patience_s: float) -> None:
        self._store = store
        self._aside: _C.AsideStore | None = None  # from the first exchange on
        self._rank, self._patience_s = rank, patience_s
        self._keys = [f"note/{peer}" for peer in range(size)]
        self._notes: dict[int, Note] = {}  # empty: nobody waits, or nothing has been read yet
        self._asked: list[tuple[int, float]] = []  # this rank's asks in this stall, and when
        self._seen = self._calm = -1  # what the counter said now, and when nobody asked
        self._mute = "" if store is not None else "the group has no store"

    # --- from the thread that talks to the store ---

    def exchange(self, write: Callable[[int], Note], *, asking: bool) -> None:
        """Asks all ranks for their notes, or answers if another rank has asked.

        Args:
            write: makes this rank's note, which holds the number that it is given.
        """
        if self._store is None or self._mute:
            return
        try:
            if self._aside is None:
                self._aside = _C.AsideStore(self._store)
            asks = self._aside.add("asks", 1 if asking else 0)
            first, changed, self._seen = self._seen < 0, asks != self._seen, asks
            if asking:
                self._asked.append((asks, time.monotonic()))
            elif first or not changed:
                self._calm, self._notes, self._asked = asks, {}, []
            if first or changed:
                self._aside.set(self._keys[self._rank], json.dumps(write(asks)))
            if asking or (changed and not first):
                self._notes = self._read(self._aside)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._mute = f"the group's store, which rank 0 or the launcher hosts, has failed: {reason}"

    def _read(self, store: _C.AsideStore) -> dict[int, Note]:
        keys = self._present(store, self._keys)
        texts = store.get(keys)
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in zip(keys, texts, strict=True)}

    def _present(self, store: _C.AsideStore, keys: Sequence[str]) -> list[str]:
        """Those that exist, in few requests where nearly all do."""
        if not keys or store.check(keys):
            return list(keys)
        if len(keys) == 1:
            return []
        half = len(keys) // 2
        return [*self._present(store, keys[:half]), *self._present(store, keys[half:])]

    # --- from any thread ---

    @property
    def ignorance(self) -> str:
        """Why nothing is known of the other ranks; empty if something is."""
        if self._notes:
            return ""
        return self._mute or "the group's store, which rank 0 or the launcher hosts, has not answered"

    def of_this_stall(self) -> dict[int, Note]:
        """What the other ranks have said since somebody waits."""
        notes = self._notes.items()
        return {rank: note for rank, note in notes if rank != self._rank and note["asks"] > self._calm}

    def missing(self, wait: Wait, step: int) -> list[int]:
        """The other ranks that are not known to have come to what this rank waits for in this step."""
        notes = self.of_this_stall()

        def has_come(rank: int) -> bool:
            if rank == self._rank or rank not in notes:
                return rank == self._rank
            note = notes[rank]
            return note["step"] > step or (note["step"] == step and wait.is_passed_in(note["waits"]))

        return [rank for rank in range(len(self._keys)) if not has_come(rank)]

    def fate(self, rank: int, step: int) -> str:
        """What has become of a rank that is waited for in this step, as a line."""
        note, now = self._notes.get(rank), time.monotonic()
        answered = note["asks"] if note is not None else -1
        silent_s = now - next((at for asks, at in list(self._asked) if asks > answered), now)
        if note is not None and answered > self._calm and silent_s <= self._patience_s:
            return stall_text.fate(rank, note, step=step)
        overdue = silent_s > self._patience_s
        return stall_text.silence(rank, note, seconds=silent_s, overdue=overdue)


def waits_of(activity: Iterable[tuple[str, int, float]], describe: Callable[[int], str]) -> list[Wait]:
    """What an engine's activity() shows, one Wait for each bucket and each other task.

    An operation is what its bucket, or the task that runs, is doing.
    """
    tasks: dict[tuple[str, int], Wait] = {}
    operations: list[Wait] = []
    for text, bucket, since in activity:
        queued, what = text.startswith(_QUEUED), text.removeprefix(_QUEUED)
        if what in _OPERATIONS:
            operations.append(Wait(what, bucket, since))
        elif what != _STANDS_STILL:
            name = describe(bucket) if bucket >= 0 else what
            tasks[name, bucket] = Wait(name, bucket, since, "queued" if queued else "")
    for operation in operations:
        # The agreement's goes on while the task that waits for it is queued.
        own = [key for key, task in tasks.items() if task.bucket == operation.bucket]
        if own:
            tasks[own[0]] = tasks[own[0]]._replace(doing=f"in {operation.what}")
        else:
            tasks.setdefault((operation.what, operation.bucket), operation)
    return list(tasks.values())
