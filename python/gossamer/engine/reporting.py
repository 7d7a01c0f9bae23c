"""The figures of one engine's steps: bytes that communicators count, and times of the native recorder.

Nothing is sent. engine.py owns one Figures.
"""

import math
from typing import Any

import torch

from gossamer import _C
from gossamer.codec import Codec
from gossamer.comm import way_of
from gossamer.engine.buckets import Buckets
from gossamer.engine.parts import Parts
from gossamer.observe.report import Counted, Report


class Figures:
    """Counts from reset() on."""

    def __init__(self, native: _C.Engine, parts: Parts, buckets: Buckets) -> None:
        self._native, self._comm, self._algorithm, self._buckets = (
            native,
            parts.comm,
            parts.algorithm,
            buckets,
        )
        world = self._comm.world if isinstance(self._comm, _C.ByHosts) else self._comm
        self._counting = [self._comm] if world is parts.control else [self._comm, parts.control]
        self.reset()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent for the model since it was wrapped."""
        return sum(comm.bytes_sent for comm in self._counting) + self._algorithm.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Payload bytes that this rank has received for the model since it was wrapped."""
        return sum(comm.bytes_received for comm in self._counting) + self._algorithm.bytes_received

    def reset(self) -> None:
        """Start all counters again with the step that begins now."""
        self._native.recorder.clear()
        self._base = self._native.step, self.bytes_sent, self.bytes_received

    def report(self, *, reset: bool, codec_error: bool) -> Report:
        """Return the figures since the last reset. See Face.report."""
        errors = self._codec_errors() if codec_error else {}
        self._native.flight.keep_gradients(codec_error)
        known = [pair for pair in errors.values() if pair is not None]
        recorder, (backwards, sent, received) = self._native.recorder, self._base
        report = Report(
            Counted(
                steps=recorder.steps(),
                totals=recorder.totals(),
                backwards=self._native.step - backwards,
                bytes_out=self.bytes_sent - sent,
                bytes_in=self.bytes_received - received,
                timed=self._comm.device.type == "cpu",
                algorithm=repr(self._algorithm),
                sums=way_of(self._comm),
                buckets=[self._about(bucket, errors) for bucket in self._buckets.all],
                codec_error=_relative(known) if known else None,
            )
        )
        if reset:
            self.reset()
        return report

    def _about(self, bucket: _C.Bucket, errors: dict[int, tuple[float, float] | None]) -> dict[str, Any]:
        codec = self._algorithm.codec_of(bucket)
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
        """Return the squared norms of (decoded - gradient, gradient) by bucket; None without codec or gradient."""
        self._native.worker.wait()
        kept = self._native.flight.kept_gradients()
        with torch.no_grad():
            return {
                bucket.index: _squares(kept.get(bucket.index), self._algorithm.codec_of(bucket))
                for bucket in self._buckets.all
            }


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
