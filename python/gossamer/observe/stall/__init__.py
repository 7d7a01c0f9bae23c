"""The stall watch: it notices when a rank waits too long for other ranks, and says which ranks have not come.

watch.py decides what is said and when; waits.py lists what this rank waits for; notes.py exchanges notes with the
other ranks through a store; text.py has the words; threads.py runs every watch of the process on two threads; named.py
is the watch of Horovod's named operations. The watch takes part in no collective.
"""

from gossamer.observe.stall.named import NamedWatch
from gossamer.observe.stall.text import PACKAGES
from gossamer.observe.stall.watch import Limits, Watch, Watched

__all__ = ["PACKAGES", "Limits", "NamedWatch", "Watch", "Watched"]
