"""The engine: when a bucket is sent, and on what memory. Native underneath; see csrc/engine."""

from gossamer.engine.background import Background
from gossamer.engine.engine import Engine
from gossamer.engine.plan import plan_buckets
from gossamer.engine.worker import Worker, agree_on_finite

__all__ = ["Background", "Engine", "Worker", "agree_on_finite", "plan_buckets"]
