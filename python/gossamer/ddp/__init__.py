"""gossamer.DistributedDataParallel: torch DDP's arguments and behaviour over the engine. Argument translation only."""

from gossamer.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
