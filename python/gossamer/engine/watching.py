# Opens the stall watch (observe/stall) of an engine: where the ranks of its group can leave notes for each other,
# under a name that no other model has. Used by engine.py.
"""``open_watch()``."""

import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from gossamer.comm import Communicator, store_of
from gossamer.engine.buckets import Buckets
from gossamer.observe.stall import Limits, Watch

_counts: "WeakKeyDictionary[Communicator, int]" = (
    WeakKeyDictionary()
)  # of models that a user gave one communicator


def watch_of(
    native: Any, comm: Communicator, limits: Limits | None, *, describe: Callable[[int], str], unit: str
) -> Watch:
    """A watch of what waits for the other ranks of `comm`, which all open theirs in the same order. Sends nothing."""
    _counts[comm] = number = _counts.get(comm, 0) + 1
    store, chosen = store_of(comm, f"stall/{number}"), limits or Limits.configured()
    return Watch(native, comm.rank, comm.size, describe=describe, store=store, limits=chosen, unit=unit)


def open_watch(native: Any, control: Communicator, limits: Limits | None, buckets: Buckets) -> Watch:
    """The watch of a native engine; all ranks of `control` open theirs in the same order. Sends nothing."""
    plan = weakref.ref(buckets)

    def describe(bucket: int) -> str:
        known = plan()
        found = known.all[bucket : bucket + 1] if known is not None else []
        return repr(found[0]) if found else f"bucket {bucket}"

    return watch_of(native, control, limits, describe=describe, unit="step")
