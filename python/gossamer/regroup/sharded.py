"""Survival where each rank keeps a share of the optimizer's state: gs.Sharded.

Each share is on several ranks, which all step it. When a member dies, the others form a group and end the step that was
under way with the shares that they have: gradients are averaged as ever, but nobody sends weights. At the next boundary
each part of the weights and of the state comes from a rank that has stepped it, and they are divided among the new
group. A newcomer gets its share there.
"""

import json
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms import Sharded, ShardedOptimizer
from gossamer.engine import Connections, Face, broadcast_everywhere, weak_call
from gossamer.engine.agree import gather_texts
from gossamer.engine.survival import Own
from gossamer.regroup.in_step import InStepSurvivor
from gossamer.regroup.newcomer import Copy, OptimizerCopy


class ShardedSurvivor(InStepSurvivor):
    """See the module."""

    _copies_common = False  # a newcomer has copied nothing

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert isinstance(self._face.engine.algorithm, Sharded)
        self._algorithm: Sharded = self._face.engine.algorithm

    @classmethod
    def copy_for(cls, face: Face, optimizers: Sequence[torch.optim.Optimizer]) -> Copy:
        """See Survivor."""
        return OptimizerCopy([])

    def save_optimizer(self, optimizer: torch.optim.Optimizer, *, with_state: bool) -> dict[str, Any]:
        """See Survivor."""
        assert isinstance(optimizer, ShardedOptimizer)
        return optimizer.settings()

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """See Survivor."""
        assert isinstance(optimizer, ShardedOptimizer)
        optimizer.load_settings(saved)

    # --- in a step ---

    def _arm(self) -> None:
        super()._arm()
        if self._member is not None:
            self._algorithm.heal_clips(weak_call(weakref.WeakMethod(self._heal_clip)))

    def _heal_clip(self) -> bool:
        """Join the next group between a backward and a step. Return False if the group has lost no member."""
        if not self._lost_place():
            return False
        self._regroup()
        return True

    # --- in the next group ---

    def _met(self, links: Connections, own: Own) -> None:
        texts = partial(gather_texts, links.control)
        mine = [self._failed_in_step, own.optimizer_steps, *self._algorithm.clipped]
        every = [json.loads(text) for text in texts(json.dumps(mine))]
        _, _, *clipped = max(every, key=lambda told: told[2])
        self._algorithm.go_on(texts, tuple(clipped))
        lost = max((steps for failed, steps, *_ in every if failed), default=None)
        if lost is None:
            return
        # Who has the weights of that step may have begun the next one, and the others take part in it.
        with_weights = [
            rank for rank, (failed, steps, *_) in enumerate(every) if not failed and steps >= lost
        ]
        if with_weights:
            with torch.no_grad():
                broadcast_everywhere(links.comm, links.control, self._common(), with_weights[0])

    def _compare(self) -> None:
        holders = self._member.holders() if self._member is not None else []
        if holders:
            control = self.control
            self._algorithm.divide_anew(partial(gather_texts, control), holds=control.rank in holders)
        super()._compare()

    # --- newcomers ---

    def _large_state(self) -> Any:
        return OptimizerCopy([]).state()

    def _large_tensors(self, own: Own) -> list[Tensor]:
        return []

    def _tell_step(self, number: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Newcomers get the state in their group."""
