"""The end of a backward, for engines written in Python: the one place outside comm/ with a private API of torch.

The native engine has its own (csrc/engine/ready.cpp). Used by the Bagua face.
"""

from collections.abc import Callable

import torch


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls `call` in the thread that called backward(), when the backward that runs now has ended.

    Only inside a backward. An error of `call` comes out of backward(). A backward that raises calls nothing.
    """
    # torch has no public hook here; DDP's Reducer and FSDP use the same call.
    torch.autograd.Variable._execution_engine.queue_callback(call)
