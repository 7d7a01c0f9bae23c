"""Bagua's names over Gossamer, module for module: ``import gossamer.bagua.torch_api as bagua``.

Argument translation. Importing it patches nothing, starts nothing and listens nowhere; patch() adds Bagua's methods to
torch's classes.
"""

from gossamer.bagua.patching import patch, unpatch

__all__ = ["patch", "unpatch"]
