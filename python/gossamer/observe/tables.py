"""The tables of print(report). report.py imports this module when it prints, because importing rich takes a while."""

from collections.abc import Mapping
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table


def text_of(report: Mapping[str, Any]) -> str:
    """Return the figures of a step and of its buckets as text."""
    console = Console(file=StringIO(), width=100, force_terminal=False, color_system=None)
    with console.capture() as shown:
        for part in (report["algorithm"], _summary(report), _of_buckets(report)):
            console.print(part)
    return shown.get().rstrip("\n")


def _summary(report: Mapping[str, Any]) -> Table:
    table = Table("a step", "")
    table.columns[1].justify = "right"
    table.add_row("steps", str(report["steps"]))
    for key in ("step", "compute", "communication", "exposed"):
        table.add_row(key, _ms(report[f"{key}_ms"]))
    table.add_row("bytes out", f"{report['bytes_out']:,.0f}")
    table.add_row("bytes in", f"{report['bytes_in']:,.0f}")
    rate = report["bandwidth_bytes_per_s"]
    table.add_row("bandwidth", "-" if rate is None else f"{rate * 8 / 1e6:,.1f} Mbit/s")
    table.add_row("sums", report["sums"])
    if report["codec_error"] is not None:
        table.add_row("codec error", f"{report['codec_error']:.3g}")
    return table


def _of_buckets(report: Mapping[str, Any]) -> Table:
    table = Table("bucket", "bytes", "codec", "communication")
    if report["codec_error"] is not None:
        table.add_column("codec error")
    for bucket in report["buckets"]:
        row = [str(bucket["index"]), f"{bucket['bytes']:,}", bucket["codec"] or "none"]
        row.append(_ms(bucket["communication_ms"]))
        if report["codec_error"] is not None:
            error = bucket.get("codec_error")
            row.append("-" if error is None else f"{error:.3g}")
        table.add_row(*row)
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
