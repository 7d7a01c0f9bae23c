# What a model's steps took, out of the counters of its native recorder: medians, a dict and a table. It knows no engine
# and asks no other rank; engine/reporting.py gives it the counters and the bytes.
"""The figures of ``model.report()``."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

WINDOW = 100  # steps that medians are over, at most; the native recorder keeps as many
MS = 1e6  # of nanoseconds


@dataclass(frozen=True)
class Counted:
    """What a report is made of. Times in nanoseconds, since the counters were reset.

    Attributes:
        steps: of each of the last WINDOW steps (wall, communication, exposed, waits, communication by bucket).
        totals: of all of them: (steps, wall, communication, exposed).
        backwards, bytes_out, bytes_in: synchronised backwards, and payload bytes that went out and came in with them.
        timed: whether operations are over when they return, as on a CPU; else their times are not known.
        buckets: index, bytes and codec of each.
    """

    steps: Sequence[tuple[int, int, int, int, Sequence[int]]]
    totals: tuple[int, int, int, int]
    backwards: int
    bytes_out: int
    bytes_in: int
    timed: bool
    algorithm: str
    sums: str = "flat"
    buckets: Sequence[dict[str, Any]] = field(default_factory=list)
    codec_error: float | None = None


class Report(Mapping[str, Any]):
    """Figures of one wrapped model on this rank. A mapping; `print(report)` shows a table.

    A step lasts from the end of a synchronised backward to the end of the next one. Times are medians, in milliseconds,
    over the steps since the counters were reset, the last 100 of them at most; None where there was no step, or where
    the device runs on after an operation has returned.

    Keys:
        steps: how many steps the medians are over.
        step_ms: from end to end, with whatever the program does in between.
        exposed_ms: what a thread of the program stood still for the worker, in backward and elsewhere.
        compute_ms: the rest of the step: all that was no waiting.
        communication_ms: while at least one operation with other ranks was under way on the worker, from its start
            until its result was taken. It is hidden behind compute_ms as far as it is not exposed.
        bytes_out, bytes_in: payload bytes to and from other ranks, the mean of a step.
        bandwidth_bytes_per_s: bytes_out over the time of communication, of all steps together.
        codec_error: |decoded - gradient| / |gradient| of this rank's gradients in the last step, over the buckets that
            have a codec; None unless asked for.
        algorithm: with its settings.
        sums: "flat" or "by hosts", and why: whether the sums of its gradients are exact inside hosts, and through the
            codec between them.
        buckets: a dict each, in the order in which they are sent: index, bytes (of gradients), codec or None,
            communication_ms, and codec_error if it was asked for.
        waits: how often the program waited for the worker in a step.
    """

    def __init__(self, counted: Counted) -> None:
        self._figures = _figures(counted)

    def as_dict(self) -> dict[str, Any]:
        """A copy, of plain numbers, strings and lists."""
        return {**self._figures, "buckets": [dict(bucket) for bucket in self._figures["buckets"]]}

    def scalars(self) -> dict[str, float]:
        """The known figures that are one number each, as `gossamer/step_ms` and so on: what TensorBoard shows."""
        numbers = {key: value for key, value in self.items() if isinstance(value, (int, float))}
        return {f"gossamer/{key}": float(value) for key, value in numbers.items()}

    def __getitem__(self, key: str) -> Any:
        return self._figures[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)

    def __repr__(self) -> str:
        return f"Report({self._figures!r})"

    def __str__(self) -> str:
        from gossamer.observe.tables import text_of  # rich, which importing gossamer must not cost

        return text_of(self)


class Reports(list[Report]):
    """The reports of all models of this process, in the order in which they were wrapped; prints as tables."""

    def scalars(self) -> dict[str, float]:
        """Those of the one report; of several with the number of each, as `gossamer/0/step_ms`."""
        if len(self) == 1:
            return self[0].scalars()
        numbered = ((f"gossamer/{number}/", each.scalars()) for number, each in enumerate(self))
        return {
            key.replace("gossamer/", own, 1): value for own, each in numbered for key, value in each.items()
        }

    def __str__(self) -> str:
        return "\n".join(str(each) for each in self) or "no model is wrapped"


def _figures(counted: Counted) -> dict[str, Any]:
    steps, timed = counted.steps, counted.timed
    count, _, communication, _ = counted.totals
    backwards = max(counted.backwards, 1)
    sent = counted.bytes_out / backwards
    buckets = []
    for bucket in counted.buckets:
        times = [of[bucket["index"]] if bucket["index"] < len(of) else 0 for *_, of in steps]
        buckets.append({**bucket, "communication_ms": _median(times) if timed else None})
    return {
        "steps": len(steps),
        "step_ms": _median([wall for wall, *_ in steps]),
        "compute_ms": _median([wall - exposed for wall, _, exposed, *_ in steps]) if timed else None,
        "communication_ms": _median([busy for _, busy, *_ in steps]) if timed else None,
        "exposed_ms": _median([exposed for _, _, exposed, *_ in steps]) if timed else None,
        "bytes_out": sent,
        "bytes_in": counted.bytes_in / backwards,
        "bandwidth_bytes_per_s": sent * count / (communication / 1e9) if timed and communication else None,
        "codec_error": counted.codec_error,
        "algorithm": counted.algorithm,
        "sums": counted.sums,
        "buckets": buckets,
        "waits": median([waits for *_, waits, _ in steps]) if steps else None,
    }


def _median(nanoseconds: Sequence[int]) -> float | None:
    return median(nanoseconds) / MS if nanoseconds else None
