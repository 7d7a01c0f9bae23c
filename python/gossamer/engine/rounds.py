"""Rounds: several backwards bring gradients, and a call ends the round. For faces that see an optimizer and no model.

The counting is native (csrc/engine/ending/rounds.h). Every rank ends equally many rounds. A rank without a gradient
takes part with zeros, and so does a rank whose shadow() runs.
"""

from collections.abc import Sequence

import torch

from gossamer.engine.engine import Engine


class Rounds:
    """The rounds of one engine, whose before_forward() is then not called."""

    def __init__(self, engine: Engine) -> None:
        # An engine that goes by rounds has no other moments, so this class works on its private parts.
        self._native, self._uneven = engine.native, engine.uneven
        self._buckets, self._control = engine._buckets, engine._control

    def begin(self, passes: int, order: Sequence[int]) -> None:
        """Let the engine go by rounds from now on. Collective. Call it once, before the first backward.

        Args:
            passes: the number of gradients that complete a parameter. Ranks may differ.
            order: indices of parameters in the order of their gradients. Rank 0's order decides the plan.
        """
        planned = [index for bucket in self._buckets.all for index in bucket.param_indices]
        came = [index for index in order if index in set(planned)]
        wanted = torch.tensor(came + [index for index in planned if index not in set(came)], device="cpu")
        self._control.broadcast(wanted, 0).wait()
        self._buckets.arrive(wanted.tolist())
        self._native.resume(1, 0)  # as if after the first step: the order is known
        self._native.rounds.set_passes(passes)
        self._native.end_by(self._native.rounds)
        self._uneven.begin(divide_by_initial_world_size=True)

    def set_passes(self, passes: int) -> None:
        """Let parameters that are not complete wait for this number of gradients from now on."""
        self._native.rounds.set_passes(passes)

    @property
    def under_way(self) -> bool:
        """Whether a parameter of this round is complete, and may have been sent."""
        return self._native.rounds.under_way

    def end(self) -> None:
        """Send what is left, and wait. Every trained parameter then has the reduced gradient. Collective.

        Raises:
            ConfigError: on every rank. A gradient cannot be sent; later rounds still work.
            CommError: another rank has failed. This engine has stopped.
        """
        self._native.end_round()

    def shadow(self) -> None:
        """Take part in the other ranks' rounds with zeros, until every rank does so. Drops this rank's gradients.

        Raises:
            CommError: another rank has failed. This engine has stopped.
        """
        if self.under_way:
            self.end()
        while self._uneven.shadow():
            pass
