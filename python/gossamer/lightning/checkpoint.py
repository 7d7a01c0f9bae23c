"""What a checkpoint of Lightning or Fabric holds beside what they put there: the algorithm's state of every rank.

One file serves all ranks, so rank 0 gets the others' states. Where ranks hold weights of their own, those and the
optimizers' states are among them. Who calls: trainer.py and fabric_strategy.py.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.algorithms import Algorithm
from gossamer.errors import ConfigError
from gossamer.torch_private import tree_map

KEY = "gossamer"  # of the checkpoint's dictionary

_log = logging.getLogger("gossamer")


def gather(
    wrapper: Any, algorithm: Algorithm, optimizers: Mapping[Any, torch.optim.Optimizer]
) -> dict[str, Any] | None:
    """What own_state() returns of all ranks, on rank 0; None on the others. Collective."""
    return gather_states(own_state(wrapper, algorithm, optimizers))


def own_state(
    wrapper: Any, algorithm: Algorithm, optimizers: Mapping[Any, torch.optim.Optimizer]
) -> tuple[str, dict[str, Any]]:
    """The algorithm's name, and this rank's state.

    Args:
        wrapper: gossamer.DataParallel, or the Bagua face's DistributedDataParallel.
        algorithm: what is at work in it.
        optimizers: its optimizers, by the names that restore() is to know them by.
    """
    own: dict[str, Any] = {"algorithm": wrapper.algorithm_state_dict()}
    if algorithm.own_weights:
        own["weights"] = wrapper.module.state_dict()
        own["optimizers"] = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    own = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, own)
    return type(algorithm).__name__, own


def gather_states(own: tuple[str, dict[str, Any]]) -> dict[str, Any] | None:
    """What restore() takes, on rank 0; None on the others. Collective."""
    name, state = own
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(state, every)
    return None if every is None else {"algorithm": name, "ranks": every}


def restore(
    wrapper: Any,
    algorithm: Algorithm,
    optimizers: Mapping[Any, torch.optim.Optimizer],
    saved: Mapping[str, Any] | None,
) -> None:
    """Gives this rank back what gather() took from it. Collective. Load model and optimizers first.

    Raises:
        ConfigError: the state is of another algorithm, or of another number of ranks and cannot be divided.
    """
    name = type(algorithm).__name__
    if saved is None:
        _log.info("the checkpoint holds no state of gossamer; %s begins anew", name)
        return
    own = _own(name, saved)
    if "weights" in own:
        wrapper.module.load_state_dict(own["weights"])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(own["optimizers"][name])
    wrapper.load_algorithm_state_dict(own["algorithm"])


def _own(algorithm: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    if saved["algorithm"] != algorithm:
        raise ConfigError(
            f"checkpoint: it was saved with the algorithm {saved['algorithm']}, and this run has "
            f"{algorithm}; resume with the same, or load its weights alone and begin anew"
        )
    states: list[dict[str, Any]] = saved["ranks"]
    rank, size = dist.get_rank(), dist.get_world_size()
    if len(states) == size:
        return states[rank]
    if any(
        "weights" in each or each["algorithm"]["fields"] or each["algorithm"]["algorithm"] for each in states
    ):
        raise ConfigError(
            f"checkpoint: the state of {algorithm} was saved by {len(states)} ranks, and this run has "
            f"{size}; resume with as many, or load its weights alone and begin anew"
        )
    return states[0]  # counters and the bucket plan, which ranks have in common
