"""Survival where the ranks exchange weights or momenta in every step: the Adam family, and averaging with peers.

When a member dies, the others end the step that was under way alone, each with its own gradients, and form a group.
At the next boundary they average exactly what they hold: weights, and what the algorithm keeps alike on all ranks.
So no step of theirs is lost or done twice. Where ranks average gradients, that goes on as in gradients.py.

If a rank of the Adam family has had the means of that step, the others take its weights and momenta instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.comm import gather_numbers
from gossamer.engine import Connections, Face, Unsent, broadcast_everywhere
from gossamer.engine.agree import mean_everywhere
from gossamer.engine.survival import Own
from gossamer.regroup.in_step import InStepSurvivor
from gossamer.regroup.newcomer import Copy, OptimizerCopy


class ConsensusSurvivor(InStepSurvivor):
    """See the module."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._algorithm = self._face.engine.algorithm
        self._apart = self._algorithm.own_weights
        # Then no rank can take the means of a step from another.
        self._sends_weights = "weight" in self._algorithm.fields
        # Where ranks hold different weights, they average them before a newcomer takes them.
        self._copies_common = not self._apart

    @classmethod
    def copy_for(cls, face: Face, optimizers: Sequence[torch.optim.Optimizer]) -> Copy:
        """See Survivor."""
        return (
            OptimizerCopy(optimizers)
            if face.algorithm_given.own_weights
            else super().copy_for(face, optimizers)
        )

    # --- in a step ---

    def _forgive(self, error: RuntimeError) -> bool:
        forgiven = super()._forgive(error)
        self._algorithm.alone |= forgiven and self._sends_weights
        return forgiven

    def _leave_engine(self, *, crashed: bool) -> None:
        super()._leave_engine(crashed=crashed)
        self._algorithm.alone |= crashed and self._sends_weights

    # --- in the next group ---

    def _met(self, links: Connections, own: Own) -> None:
        algorithm, failed = self._algorithm, self._failed_in_step
        every = gather_numbers(links.control, int(algorithm.alone), int(failed), own.optimizer_steps)
        algorithm.alone = any(alone for alone, *_ in every)
        lost = max((steps for _, lacks, steps in every if lacks), default=None)
        if self._sends_weights or lost is None:
            return
        with_means = [rank for rank, (_, lacks, steps) in enumerate(every) if not lacks and steps >= lost]
        if not with_means:
            algorithm.alone = True
            return
        held = [*self._common(), *algorithm.states_alike()]
        with torch.no_grad():
            taken = held if failed else [tensor.clone() for tensor in held]
            broadcast_everywhere(links.comm, links.control, taken, with_means[0])
        if failed:
            algorithm.after_consensus()
            for bucket in self._face.engine.buckets:  # the others have had the messages of this step
                if Unsent.FIELD in bucket.fields:
                    bucket.flat(Unsent.FIELD).zero_()

    def _welcome(self) -> None:
        if self._apart or self._algorithm.alone:
            self._face.consensus()
            links = self._face.links
            with torch.no_grad():
                mean_everywhere(links.comm, links.control, self._algorithm.states_alike())
        self._algorithm.alone = False
        super()._welcome()

    def _take_part(self) -> None:
        super()._take_part()
        self._algorithm.alone = False  # all have one state

    def _has_common(self) -> None:
        self._algorithm.after_consensus()

    # --- newcomers ---

    def _large_state(self) -> Any:
        return OptimizerCopy(self._optimizers).state() if self._apart else super()._large_state()

    def _large_tensors(self, own: Own) -> list[Tensor]:
        return self._algorithm.states_alike() if self._apart else super()._large_tensors(own)

    def _tell_step(self, number: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._apart:
            super()._tell_step(number, optimizer)
