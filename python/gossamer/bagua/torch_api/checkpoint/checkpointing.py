"""Bagua's checkpoint files: ``iter_0000012/mp_rank_00_model_states.pt`` and a file that names the latest.

Replicas are equal, so rank 0 writes for all. What an algorithm keeps besides is not in these files.
"""

import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.bagua.torch_api import communication, env
from gossamer.errors import ConfigError, GossamerError

LATEST = "latest_checkpointed_iteration.txt"


def save_checkpoint(
    iteration: int,
    checkpoints_path: "str | os.PathLike[str]",
    model: nn.Module,
    optimizer: "torch.optim.Optimizer | None" = None,
    lr_scheduler: Any = None,
) -> None:
    """Writes the state_dicts that are given, on rank 0. Every worker calls it, and returns when the file is there.

    A file is renamed into place when it is complete, and named as the latest after that.

    Raises:
        GossamerError: on every rank, if rank 0 could not write; the cause is chained there.
    """
    problem = None
    if env.get_rank() == 0:
        given = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        states = {name: each.state_dict() for name, each in given.items() if each is not None}
        try:
            _write(Path(checkpoints_path), iteration, {"iteration": iteration, **states})
        except Exception as error:  # whatever it is, the others must not wait for this rank
            problem = error
    told = None if problem is None else str(problem)
    if communication.is_initialized():
        told = communication.broadcast_object(told)
    if told is not None:
        raise GossamerError(
            f"save_checkpoint: rank 0 could not write {checkpoints_path}: {told}"
        ) from problem


def load_checkpoint(
    checkpoints_path: "str | os.PathLike[str]",
    model: nn.Module,
    optimizer: "torch.optim.Optimizer | None" = None,
    lr_scheduler: Any = None,
    strict: bool = True,
    *,
    weights_only: bool = True,
) -> int:
    """Loads the latest checkpoint, in place, and returns its iteration; 0, with a warning, where there is none.

    Args:
        strict: as in nn.Module.load_state_dict.
        weights_only: False unpickles whatever is in the file, which may run code: for files that you trust.

    Raises:
        ConfigError: the file that names the latest is damaged, the one that it names is missing, holds other
            objects than tensors and plain values, or lacks the state of the optimizer or scheduler given.
    """
    folder = Path(checkpoints_path)
    latest = folder / LATEST
    if not latest.exists():
        logging.getLogger("gossamer").warning("load_checkpoint: there is no %s; starting at 0", latest)
        return 0
    if re.fullmatch(r"\d+", text := latest.read_text().strip()) is None:
        raise ConfigError(
            f"load_checkpoint: {latest} must hold the number of an iteration, got {text[:40]!r}."
        )
    file = _file(folder, int(text))
    if not file.exists():
        raise ConfigError(f"load_checkpoint: {latest} names iteration {text}, but there is no {file}.")
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"load_checkpoint: {file} holds objects that are no tensors or plain values; "
            f"if you trust it, pass weights_only=False. ({error})"
        ) from error
    given = {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
    wanted: dict[str, Any] = {name: target for name, target in given.items() if target is not None}
    missing = [name for name in wanted if name not in state]
    if missing:
        raise ConfigError(
            f"load_checkpoint: {file} holds {sorted(state)}, but no {' and no '.join(missing)}."
        )
    model.load_state_dict(state["model"], strict=strict)
    for name, target in wanted.items():
        target.load_state_dict(state[name])
    return int(state["iteration"])


def _file(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}" / "mp_rank_00_model_states.pt"


def _write(folder: Path, iteration: int, state: dict[str, Any]) -> None:
    file = _file(folder, iteration)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, partial := file.with_suffix(".partial"))
    partial.replace(file)
    (partial := folder / f"{LATEST}.partial").write_text(str(iteration))
    partial.replace(folder / LATEST)
