"""Eyes on what happens: figures of each step, and a timeline of all ranks. The recorder is native; see csrc/observe."""

from gossamer.observe.report import Report, Reports
from gossamer.observe.timeline import start_timeline, stop_timeline

__all__ = ["Report", "Reports", "start_timeline", "stop_timeline"]
