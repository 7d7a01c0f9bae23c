"""Manual optimization: backwards whose forward did not go through the wrapper, or only the first of several did.

Called by the Trainer's strategies before each backward. Nothing for automatic optimization, where the wrapper sees
every forward.
"""

from typing import Any

from torch import Tensor

from gossamer.engine import Engine


def before_backward(module: Any, engine: Engine, loss: Tensor) -> None:
    """Tells the engine what it would have learnt from a forward; again changes nothing.

    Args:
        module: the LightningModule.
        loss: what backward() is called on.
    """
    if module.automatic_optimization:
        return
    # By hand there may be several steps in one training_step(). Where ranks do not meet in every step, weights may
    # change before a forward, which the one that has been must not see.
    if engine.algorithm.lockstep:
        engine.before_forward()
    engine.after_forward(loss)
