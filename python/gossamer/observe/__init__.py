"""Shows what happens: figures of each step, a timeline of all ranks, the stall watch. csrc/observe records it."""

from gossamer.observe.report import Report, Reports
from gossamer.observe.timeline import start_timeline, stop_timeline

__all__ = ["Report", "Reports", "start_timeline", "stop_timeline"]
