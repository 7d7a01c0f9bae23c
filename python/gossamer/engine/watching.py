"""Opens the stall watch (observe/stall) of an engine, with a place in its group's store that no other model uses."""

import weakref
from collections.abc import Callable
from weakref import WeakKeyDictionary

from gossamer import _C
from gossamer.comm import Communicator, store_of
from gossamer.engine.buckets import Buckets
from gossamer.observe.stall import Limits, Watch, Watched

_counts: "WeakKeyDictionary[Communicator, int]" = WeakKeyDictionary()  # models so far over one communicator


def watch_of(
    native: Watched, comm: Communicator, limits: Limits | None, *, describe: Callable[[int], str], unit: str
) -> Watch:
    """Open a watch of what waits for the other ranks of `comm`. All ranks open theirs in one order. Sends nothing."""
    _counts[comm] = number = _counts.get(comm, 0) + 1
    store, chosen = store_of(comm, f"stall/{number}"), limits or Limits.configured()
    return Watch(native, comm.rank, comm.size, describe=describe, store=store, limits=chosen, unit=unit)


def open_watch(native: _C.Engine, control: Communicator, limits: Limits | None, buckets: Buckets) -> Watch:
    """Open the watch of a native engine. All ranks of `control` open theirs in the same order. Sends nothing."""
    plan = weakref.ref(buckets)

    def describe(bucket: int) -> str:
        known = plan()
        found = known.all[bucket : bucket + 1] if known is not None else []
        return repr(found[0]) if found else f"bucket {bucket}"

    return watch_of(native, control, limits, describe=describe, unit="step")
