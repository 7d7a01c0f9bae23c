"""Saving and loading a training state in Bagua's file layout."""

from gossamer.bagua.torch_api.checkpoint.checkpointing import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
