"""The figures of model.report(): medians of the native recorder's counters, as a mapping and as a table.

engine/reporting.py provides the counters and bytes. Nothing here knows an engine or asks another rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

WINDOW = 100  # the most steps that a median covers; the native recorder keeps as many
MS = 1e6  # nanoseconds


@dataclass(frozen=True)
class Counted:
    """The counters that a report is made of, since the last reset. Times are nanoseconds.

    Attributes:
        steps: (wall, communication, exposed, waits, communication by bucket) of each of the last WINDOW steps.
        totals: (steps, wall, communication, exposed) of all steps.
        backwards, bytes_out, bytes_in: synchronised backwards, and the payload bytes that they sent and received.
        timed: operations have ended when they return, as on a CPU. Else their times are not known.
        algorithm: the algorithm with its settings.
        sums: "flat", "by hosts" or "through host memory", and why.
        buckets: the index, bytes and codec of each bucket.
        codec_error: see Report; None: not asked for.
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
    """The figures of one wrapped model on this rank. It is a mapping; `print(report)` shows a table.

    A step lasts from the end of a synchronised backward to the end of the next one. Times are medians in milliseconds
    over the steps since the last reset, but at most the last 100. A time is None if there was no step, or if the device
    still works after an operation has returned.

    Keys:
        steps: the number of steps that the medians cover.
        step_ms: the whole step, with whatever the program does in it.
        exposed_ms: the time in which the program waited for the worker, in backward and elsewhere.
        compute_ms: the rest of the step.
        communication_ms: the time in which at least one operation with other ranks was under way on the worker. The
            part that is not exposed is hidden behind compute_ms.
        bytes_out, bytes_in: payload bytes to and from other ranks, the mean of a step.
        bandwidth_bytes_per_s: bytes_out divided by the time of communication, over all steps.
        codec_error: |decoded - gradient| / |gradient| of this rank's gradients in the last step, over the buckets that
            have a codec; None unless it was asked for.
        algorithm: the algorithm with its settings.
        sums: "flat", "by hosts" or "through host memory", and why. By hosts, gradients are summed exactly inside
            a host, and through the codec between hosts.
        buckets: a dict for each bucket, in the order in which they are sent: index, bytes of gradients, codec or None,
            communication_ms, and codec_error if it was asked for.
        waits: how often the program waited for the worker in a step.
    """

    def __init__(self, counted: Counted) -> None:
        self._figures = _figures(counted)

    def as_dict(self) -> dict[str, Any]:
        """Return a copy of plain numbers, strings and lists."""
        return {**self._figures, "buckets": [dict(bucket) for bucket in self._figures["buckets"]]}

    def scalars(self) -> dict[str, float]:
        """Return the figures that are one number each, as `gossamer/step_ms` and so on, for TensorBoard."""
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
    """The reports of all models of this process, in the order in which they were wrapped. Prints as tables."""

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the reports. Of several reports each has its number, as in `gossamer/0/step_ms`."""
        scalars: dict[str, float] = {}
        for number, report in enumerate(self):
            own = "gossamer/" if len(self) == 1 else f"gossamer/{number}/"
            scalars |= {key.replace("gossamer/", own, 1): value for key, value in report.scalars().items()}
        return scalars

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
