# `horovod.run(func, np=4)`, Horovod's way to start workers from Python: the launcher's, in gossamer/launch/function.py.
# No part of training; imported on the first use of the name alone, since the launcher is above the faces.
"""``horovod.run``."""

from gossamer.launch.function import run

__all__ = ["run"]
