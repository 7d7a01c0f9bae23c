"""The part of a Lightning or Fabric checkpoint that belongs to Gossamer: the algorithm's state of every rank.

One file serves all ranks, so rank 0 gathers the states. Where ranks hold different weights, a state also has
weights and the optimizers' states. trainer.py and fabric_strategy.py use this module.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.torch_private import tree_map

KEY = "gossamer"  # in the checkpoint's dictionary

_log = logging.getLogger("gossamer")


def own_state(wrapper: Any, optimizers: Mapping[Any, torch.optim.Optimizer]) -> tuple[str, dict[str, Any]]:
    """Return the algorithm's name and this rank's state.

    Args:
        wrapper: a gossamer.DataParallel, or the Bagua face's DistributedDataParallel.
        optimizers: the optimizers, under the names that restore() will be given.
    """
    algorithm = wrapper.engine.algorithm
    own: dict[str, Any] = {"algorithm": wrapper.algorithm_state_dict()}
    if algorithm.own_weights:
        own["weights"] = wrapper.module.state_dict()
        own["optimizers"] = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    own = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, own)
    return type(algorithm).__name__, own


def gather(own: tuple[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return every rank's own_state(), as restore() takes it, on rank 0, and None on the others. Collective."""
    name, state = own
    every = on_rank_0(state)
    return None if every is None else {"algorithm": name, "ranks": every}


def on_rank_0(own: Any) -> list[Any] | None:
    """Return the object of every rank on rank 0, and None on the others. Collective."""
    every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, every)
    return every


def restore(
    wrapper: Any, optimizers: Mapping[Any, torch.optim.Optimizer], saved: Mapping[str, Any] | None
) -> None:
    """Load this rank's part of what gather() returned. Collective. Load model and optimizers first.

    Raises:
        ConfigError: Another algorithm saved the state; or another number of ranks did, and the algorithm does not say
            what becomes of its state then.
    """
    name = type(wrapper.engine.algorithm).__name__
    if saved is None:
        _log.info("the checkpoint holds no state of gossamer; %s begins anew", name)
        return
    own = _own(name, saved, wrapper)
    if "weights" in own:
        wrapper.module.load_state_dict(own["weights"])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(own["optimizers"][name])
    wrapper.load_algorithm_state_dict(own["algorithm"])


def _own(algorithm: str, saved: Mapping[str, Any], wrapper: Any) -> dict[str, Any]:
    if saved["algorithm"] != algorithm:
        raise ConfigError(
            f"checkpoint: it was saved with the algorithm {saved['algorithm']}, and this run has "
            f"{algorithm}; resume with the same, or load its weights alone and begin anew"
        )
    own: dict[str, Any] = wrapper.part_of_checkpoint(saved["ranks"])
    return own
