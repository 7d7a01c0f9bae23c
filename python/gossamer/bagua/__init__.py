"""Bagua's names over Gossamer, module for module: ``import gossamer.bagua.torch_api as bagua``.

Argument translation only. Importing it patches nothing, starts nothing and listens nowhere.
"""
