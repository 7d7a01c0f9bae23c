"""Survival where ranks send something in the optimizer's step too: weights, momenta, or shares of the weights."""

import weakref
from typing import Any

from gossamer.engine import weak_call
from gossamer.regroup.gradients import GradientSurvivor


class InStepSurvivor(GradientSurvivor):
    """A step whose group has lost a member ends alone. The next group is formed at the boundary after it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._failed_in_step = False

    def look(self) -> None:
        """See Survivor. Also join the next group, if the group has lost a member during the optimizer's step."""
        if self._failed_in_step:
            self._regroup()
        super().look()

    def _arm(self) -> None:
        super()._arm()
        self._failed_in_step = False
        if self._member is not None:
            self._face.engine.forgive_in_steps(weak_call(weakref.WeakMethod(self._forgive)))

    def _forgive(self, _error: RuntimeError) -> bool:
        """End the optimizer's step alone. Return False if the group has lost no member."""
        if not (self._failed_in_step or self._lost_place()):
            return False
        self._failed_in_step = True
        return True
