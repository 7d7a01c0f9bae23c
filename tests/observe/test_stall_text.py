# The texts of the stall watch, and how it reads another thread's stack. Stalled processes: test_stall.py.

import subprocess
import sys

from gossamer.observe.stall import text as stall_text

COLLECTS_ANYWHERE = """
import gc, threading, time
from gossamer.observe.stall import text as stall_text

class Dropped:
    def __init__(self):
        self.own = self
    def __del__(self):
        time.sleep(0.0001)  # without the GIL, as a wait for a thread is
        Dropped()

def start_and_end():
    while going:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

going = True
busy = threading.Thread(target=start_and_end)
busy.start()
Dropped()
gc.set_threshold(1)
for _ in range(300):
    assert "start_and_end" in stall_text.place_of(busy.ident) or "threading.py" in stall_text.place_of(busy.ident)
    assert gc.isenabled()
gc.disable()
stall_text.stack_of(busy.ident)
assert not gc.isenabled()
going = False
busy.join()
print("whole")
"""


def test_many_ranks_are_named_by_the_first_and_their_number() -> None:
    assert stall_text.name_ranks([4]) == "rank 4"
    assert stall_text.name_ranks([2, 0]) == "ranks 0, 2"
    assert stall_text.name_ranks(range(100)).endswith(" 11 and 88 more")


def test_a_look_at_a_thread_does_not_stop_the_process_when_it_collects() -> None:
    command = [sys.executable, "-c", COLLECTS_ANYWHERE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "whole\n", done.stderr
