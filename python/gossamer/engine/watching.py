"""Opens the stall watch (observe/stall) of an engine, with a place in its group's store that no other model uses."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from gossamer.comm import Communicator, store_of
from gossamer.observe.stall import Limits, Watch, Watched

_counts: "WeakKeyDictionary[Communicator, int]" = WeakKeyDictionary()  # models so far over one communicator


def watch_of(
    native: Watched, comm: Communicator, limits: Limits | None, *, describe: Callable[[int], str], unit: str
) -> Watch:
    """Open a watch of what waits for the other ranks of `comm`. All ranks open theirs in one order. Sends nothing."""
    _counts[comm] = number = _counts.get(comm, 0) + 1
    store, chosen = store_of(comm, f"stall/{number}"), limits or Limits.configured()
    return Watch(native, comm.rank, comm.size, describe=describe, store=store, limits=chosen, unit=unit)
