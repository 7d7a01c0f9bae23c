"""Survival where the ranks train alone, and each averages with some of the others: gs.LocalSGD with a topology.

Each rank has an anchor and an outer optimizer of its own. When a member dies, each of the others makes the averaging
that was under way with its own weights alone, and so do ranks that are behind, until they are where the first one is.
Then all average anchors and outer momenta exactly. With SGD as outer optimizer this is an averaging of all. So only the
share of the dead is missing, and newcomers find one anchor.

In an averaging a rank waits for its peers, and for what all ranks said in the averaging before.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.comm import gather_numbers
from gossamer.engine import Face
from gossamer.engine.agree import mean_everywhere
from gossamer.regroup.averaging import AveragingSurvivor, OwnAverages
from gossamer.regroup.newcomer import Copy, OptimizerCopy
from gossamer.regroup.survival import Wish


class PeersSurvivor(AveragingSurvivor):
    """See the module."""

    _copies_common = False  # the anchors are what the ranks average before newcomers are in

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._agreed = False  # the ranks left their last group at one boundary

    @classmethod
    def copy_for(cls, face: Face, optimizers: Sequence[torch.optim.Optimizer]) -> Copy:
        """See Survivor."""
        return OptimizerCopy(optimizers)

    def wish(self, *, change: bool, grows: bool, stop: bool) -> None:
        """See Survivor."""
        super().wish(change=change or grows, grows=grows, stop=stop)

    def change(self) -> None:
        """See Survivor."""
        self._agreed = True
        super().change()

    def meet(self) -> None:
        """See Survivor."""
        super().meet()
        if self.has_met:
            self._algorithm.hear_all()

    def _regroup(self) -> None:
        self._agreed = False
        super()._regroup()

    def _averaged(self) -> None:
        self._hear()
        if self.wished is not Wish.NOTHING:  # all ranks meet now
            self._algorithm.hear_all()

    def _expects_newcomers(self) -> bool:
        return False  # they come in when the group changes

    # --- in the next group ---

    def _settle(self, own: OwnAverages) -> None:
        fails = bool(own.pending) and not self._agreed
        counts = gather_numbers(self.control, own.rounds, int(fails))
        last = max(count for count, _ in counts)
        self.changes_at = last + any(failed and count == last for count, failed in counts)
        self._algorithm.average_alone_until(self.changes_at)

    def _welcome(self) -> None:
        links = self._face.links
        self._algorithm.hear_all()
        with torch.no_grad():
            self._algorithm.average_all(partial(mean_everywhere, links.comm, links.control))
        super()._welcome()

    # --- newcomers ---

    def _large_state(self) -> dict[str, Any]:
        return OptimizerCopy(self._optimizers).state()

    def _large_tensors(self, own: OwnAverages) -> list[Tensor]:
        return []

    def _state_of(self, own: OwnAverages, copied: bool) -> dict[str, Any]:
        return super()._state_of(own, copied=False)
