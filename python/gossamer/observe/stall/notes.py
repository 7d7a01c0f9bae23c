"""What the ranks of a group tell each other about a stall, through the group's store.

A rank that waits increments a counter in the store. Every rank that sees the counter change writes a note about itself.
While nobody waits, a look costs one short request. exchange() may block for as long as the host of the store is
stopped, so it runs on a thread of its own. watch.py uses this module.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from gossamer import _C
from gossamer.observe.stall.text import fate, silence
from gossamer.observe.stall.waits import Wait

Note = dict[str, Any]


class Notes:
    """The notes of the ranks of one group.

    Args:
        store: a store that all ranks of the group share, with a prefix that nothing else uses; None if there is none.
        rank, size: this rank and the number of ranks in the group.
        patience_s: seconds after which a rank that does not answer counts as silent.
    """

    def __init__(self, store: dist.Store | None, rank: int, size: int, *, patience_s: float) -> None:
        self._store = store
        self._aside: _C.AsideStore | None = None  # from the first exchange on
        self._rank, self._patience_s = rank, patience_s
        self._keys = [f"note/{peer}" for peer in range(size)]
        self._notes: dict[int, Note] = {}  # of all ranks; empty while nobody waits, and until the first read
        self._asked: list[tuple[int, float]] = []  # counter and monotonic time of this rank's questions
        self._seen = self._calm = -1  # the counter now, and when nobody asked
        self._mute = "" if store is not None else "the group has no store"

    # --- from the thread that talks to the store ---

    def exchange(self, write: Callable[[int], Note], *, asking: bool) -> None:
        """Ask all ranks for their notes, or answer if another rank has asked.

        Args:
            write: makes this rank's note from the counter, which the note holds.
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
        """Return the keys that exist. Takes few requests where nearly all exist."""
        if not keys or store.check(keys):
            return list(keys)
        if len(keys) == 1:
            return []
        half = len(keys) // 2
        return [*self._present(store, keys[:half]), *self._present(store, keys[half:])]

    # --- from any thread ---

    @property
    def ignorance(self) -> str:
        """Why nothing is known about the other ranks; empty if something is known."""
        if self._notes:
            return ""
        return self._mute or "the group's store, which rank 0 or the launcher hosts, has not answered"

    def of_this_stall(self) -> dict[int, Note]:
        """Return the notes that the other ranks have written since the stall began, by rank."""
        notes = self._notes.items()
        return {rank: note for rank, note in notes if rank != self._rank and note["asks"] > self._calm}

    def missing(self, wait: Wait, step: int) -> list[int]:
        """Return the other ranks that have not reached `wait` in this step, as far as their notes say."""
        notes = self.of_this_stall()

        def has_come(rank: int) -> bool:
            if rank == self._rank or rank not in notes:
                return rank == self._rank
            note = notes[rank]
            return note["step"] > step or (note["step"] == step and wait.is_passed_in(note["waits"]))

        return [rank for rank in range(len(self._keys)) if not has_come(rank)]

    def fate(self, rank: int, step: int) -> str:
        """Return one line about the state of a rank that this rank waits for in this step."""
        note, now = self._notes.get(rank), time.monotonic()
        answered = note["asks"] if note is not None else -1
        silent_s = now - next((at for asks, at in list(self._asked) if asks > answered), now)
        if note is not None and answered > self._calm and silent_s <= self._patience_s:
            return fate(rank, note, step=step)
        return silence(rank, note, seconds=silent_s, overdue=silent_s > self._patience_s)
