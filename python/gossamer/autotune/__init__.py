"""Autotune: measures bucket sizes and codecs in the first steps of a training, and goes on with the fastest."""

from gossamer.autotune.settings import Autotune, Tuned, autotune_of, refusal_of_tuning
from gossamer.autotune.tuner import Tuner

__all__ = ["Autotune", "Tuned", "Tuner", "autotune_of", "refusal_of_tuning"]
