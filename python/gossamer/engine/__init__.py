"""The engine: when a bucket is sent, and on what memory. Native underneath; see csrc/engine."""

from gossamer.engine.engine import Engine
from gossamer.engine.plan import plan_buckets

__all__ = ["Engine", "plan_buckets"]
