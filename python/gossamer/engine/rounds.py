"""Rounds: backwards bring gradients, and a call ends what they began. For faces that see an optimizer and no model.

The counting is native (csrc/engine/ending/rounds.h). A round is ended equally often on every rank; a rank that has no
gradient takes part with zeros, and so does one whose `shadow()` runs. Every engine has one Rounds.
"""

from collections.abc import Sequence

import torch

from gossamer.engine.engine import Engine


class Rounds:
    """Of one engine, which calls no before_forward() then."""

    def __init__(self, engine: Engine) -> None:
        # The engine's own parts: it has no moments but these.
        self._native, self._uneven = engine._native, engine.uneven
        self._buckets, self._control = engine._buckets, engine._control

    def begin(self, passes: int, order: Sequence[int]) -> None:
        """From now on the engine goes by rounds. Collective; called once, before the first backward.

        Args:
            passes: a parameter is complete with so many gradients; each rank's own.
            order: indices of parameters in the order in which their gradients come, on rank 0; planned by.
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
        """What is not complete yet waits for so many gradients from now on."""
        self._native.rounds.set_passes(passes)

    @property
    def under_way(self) -> bool:
        """Whether a parameter of this round is complete, and may be travelling."""
        return bool(self._native.rounds.under_way)

    def end(self) -> None:
        """Sends what is left, and waits: every trained parameter has the reduced gradient afterwards. Collective.

        Raises:
            ConfigError: on every rank, a gradient that cannot be sent; later rounds go on.
            CommError: another rank has failed; this engine has stopped.
        """
        self._native.end_round()

    def shadow(self) -> None:
        """Takes part in the others' rounds with zeros until every rank does so. Gradients here are dropped.

        Raises:
            CommError: another rank has failed; this engine has stopped.
        """
        if self.under_way:
            self.end()
        while self._uneven.shadow():
            pass
