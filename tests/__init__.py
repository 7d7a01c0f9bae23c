"""The tests, a room for each part of the package. What several rooms use is in support/."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
