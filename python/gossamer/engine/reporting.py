"""What an engine tells of its steps: the counters of its native recorder since they were reset, as a Report.

The part of Engine that faces and gs.report() ask. Bytes are counted by the communicators, times by the recorder, and
nothing is sent.
"""

import math
import weakref
from typing import Any

import torch

from gossamer import _C
from gossamer._C import ByHosts
from gossamer.codec import Codec
from gossamer.comm import way_of
from gossamer.observe.report import Counted, Report, Reports

open_engines: "weakref.WeakSet[Any]" = weakref.WeakSet()


def weights_in_buckets() -> set[int]:
    """Ids of the parameters that an algorithm works on where they lie: other memory would be lost to it."""
    working = [engine for engine in open_engines if "weight" in engine.algorithm.fields]
    return {id(param) for engine in working for param in engine._params}


class Reporting:
    """Mixed into Engine, which has all that is named here."""

    _native: Any
    _comm: Any
    _control: Any
    algorithm: Any
    buckets: Any
    backward_count: Any
    _base: tuple[int, int, int]  # backwards, bytes out, bytes in when the counters were reset

    @property
    def bytes_sent(self) -> int:
        """Payload bytes this rank has handed to other ranks for this model since it was wrapped."""
        return int(sum(comm.bytes_sent for comm in self._counting()) + self.algorithm.bytes_sent)

    @property
    def bytes_received(self) -> int:
        """Payload bytes that other ranks have handed to this one."""
        return int(sum(comm.bytes_received for comm in self._counting()) + self.algorithm.bytes_received)

    def _counting(self) -> list[Any]:
        world = self._comm.world if isinstance(self._comm, ByHosts) else self._comm
        return [self._comm] if world is self._control else [self._comm, self._control]

    @property
    def is_open(self) -> bool:
        """Until close()."""
        return self in open_engines

    @property
    def activity(self) -> list[tuple[str, int, float]]:
        """What waits or runs now: (what, bucket or -1, since when in seconds of the Unix epoch)."""
        return list(self._native.activity())

    def reset_report(self) -> None:
        """Counters begin anew with the step that begins now."""
        self._native.recorder.clear()
        self._base = self.backward_count, self.bytes_sent, self.bytes_received

    def report(self, *, reset: bool = False, codec_error: bool = False) -> Report:
        """See Face.report."""
        errors = self._codec_errors() if codec_error else {}
        self._native.flight.keep_gradients(codec_error)
        coded = [pair for pair in errors.values() if pair is not None]
        recorder, (backwards, sent, received) = self._native.recorder, self._base
        report = Report(
            Counted(
                steps=recorder.steps(),
                totals=recorder.totals(),
                backwards=self.backward_count - backwards,
                bytes_out=self.bytes_sent - sent,
                bytes_in=self.bytes_received - received,
                timed=self._comm.device.type == "cpu",
                algorithm=repr(self.algorithm),
                sums=way_of(self._comm),
                buckets=[self._about(bucket, errors) for bucket in self.buckets],
                codec_error=_relative(coded) if coded else None,
            )
        )
        if reset:
            self.reset_report()
        return report

    def _about(self, bucket: _C.Bucket, errors: dict[int, tuple[float, float] | None]) -> dict[str, Any]:
        codec = self.algorithm.codec_of(bucket)
        about: dict[str, Any] = {
            "index": bucket.index,
            "bytes": bucket.bytes,
            "codec": repr(codec) if codec else None,
        }
        if errors:
            pair = errors[bucket.index]
            about["codec_error"] = None if pair is None else _relative([pair])
        return about

    def _codec_errors(self) -> dict[int, tuple[float, float] | None]:
        """Of each bucket the squares of |decoded - gradient| and |gradient|; None where one is missing."""
        self._native.worker.wait()
        kept = self._native.flight.kept_gradients()
        with torch.no_grad():
            return {
                bucket.index: _squares(kept.get(bucket.index), self.algorithm.codec_of(bucket))
                for bucket in self.buckets
            }


def report_all(*, reset: bool = False, codec_error: bool = False) -> Reports:
    """The reports of all models that this process has wrapped and not closed. See DataParallel.report()."""
    engines = sorted(open_engines, key=lambda engine: engine._native.recorder.number)
    return Reports(engine.report(reset=reset, codec_error=codec_error) for engine in engines)


def _squares(gradient: torch.Tensor | None, codec: Codec | None) -> tuple[float, float] | None:
    if codec is None or gradient is None:
        return None
    codec = codec.plain
    gradient = gradient.view(1, -1)
    decoded = codec.decode(codec.encode(gradient), torch.empty_like(gradient))
    return float((decoded - gradient).double().square().sum()), float(gradient.double().square().sum())


def _relative(pairs: list[tuple[float, float]]) -> float:
    error, size = (sum(column) for column in zip(*pairs, strict=True))
    return math.sqrt(error / size) if size else 0.0
