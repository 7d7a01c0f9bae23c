"""``horovod.run(func, np=4)``: Horovod's way to start workers from Python. The launcher does it.

This module is imported on the first use of the name alone, because the launcher is a layer above the faces.
"""

from gossamer.launch.function import run

__all__ = ["run"]
