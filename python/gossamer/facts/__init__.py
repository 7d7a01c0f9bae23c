"""The forms in which an algorithm states facts about itself: its methods, and its traffic in a step.

Each algorithm fills them in (`Algorithm.methods`, `Algorithm.traffic`). The planner, the benchmarks and the hooks read
them. A codec's facts are in gossamer.codec.base.
"""

from gossamer.facts.methods import APART, COMPRESSED, EXACT, KINDS, ROUNDED, Method, Settings, Trial
from gossamer.facts.traffic import Cost, Job, Messages, PlannedBucket, Traffic

__all__ = [
    "APART",
    "COMPRESSED",
    "EXACT",
    "KINDS",
    "ROUNDED",
    "Cost",
    "Job",
    "Messages",
    "Method",
    "PlannedBucket",
    "Settings",
    "Traffic",
    "Trial",
]
