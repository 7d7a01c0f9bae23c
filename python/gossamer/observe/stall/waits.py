"""What this rank waits for: the activity of its engine, as one Wait for each bucket and each other task."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

NO_BUCKET, BEFORE_BUCKETS = -1, -2
# Names in an activity: operations with other ranks, a caller that waits for the worker, and a task that has not begun.
_OPERATIONS = {"all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast", "exchange"}
_OPERATIONS |= {"meet", "sum_in_place"}
_STANDS_STILL, _QUEUED = "wait", "queued: "


class Wait(NamedTuple):
    """Something that this rank waits for."""

    what: str
    bucket: int  # its number in the plan; NO_BUCKET; or BEFORE_BUCKETS for what comes before the buckets of a step
    since: float  # Unix time in seconds
    doing: str = ""  # the operation that is under way

    def is_passed_in(self, waits: Sequence[Sequence[Any]]) -> bool:
        """Whether a rank that waits for `waits`, in the same step, has already reached this wait."""
        return any(
            what == self.what or (self.bucket != NO_BUCKET and bucket > self.bucket)
            for what, bucket, *_ in waits
        )


def waits_of(activity: Iterable[tuple[str, int, float]], describe: Callable[[int], str]) -> list[Wait]:
    """Turn an engine's activity() into waits.

    An operation belongs to the task of its bucket, or to the task that runs.

    Args:
        activity: (what, bucket or -1, Unix time in seconds) of each thing that waits or runs.
        describe: the text for a bucket's number.
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
        # The agreement's operation runs while the task that waits for it is still queued.
        own = [key for key, task in tasks.items() if task.bucket == operation.bucket]
        if own:
            tasks[own[0]] = tasks[own[0]]._replace(doing=f"in {operation.what}")
        else:
            tasks.setdefault((operation.what, operation.bucket), operation)
    return list(tasks.values())
