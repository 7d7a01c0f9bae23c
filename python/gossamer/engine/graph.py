"""Rules that torch DDP has for which parameters a backward reaches, and its error for those that were left out: its
text to the letter, because programs that know it look for it. Used by engine.py.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from gossamer.comm import Communicator
from gossamer.engine.agree import gather_texts
from gossamer.errors import UsageError

_UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
    "This error indicates that your module has parameters that were not used in producing loss. "
    "You can enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
    "`torch.nn.parallel.DistributedDataParallel`, and by \n"
    "making sure all `forward` function outputs participate in calculating loss. \n"
    "If you already have done the above, then the distributed data parallel module wasn't able to locate the output "
    "tensors in the return value of your module's `forward` function. Please include the loss function and the "
    "structure of the return value of `forward` of your module when reporting this issue (e.g. list, dict, iterable)."
)
_CHANGED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
    "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
    "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to True."
)
_ADVICE = (
    "\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to print "
    "out information about which particular parameters did not receive gradient on this rank as part of this error"
)


class Graph:
    """What the backwards of one engine must have in common; by default nothing.

    Args:
        native: the native engine.
        control: the group, for CPU tensors.
        named: all parameters.
    """

    def __init__(self, native: Any, control: Communicator, named: Mapping[str, Parameter]) -> None:
        self._native, self._control, self._named = native, control, named
        self._static = False
        self.require_used = False  # True: a parameter without a gradient is an error in the next forward
        self._lockstep = True  # of the backward before: else this rank's knowledge is its own

    def use_static(self) -> None:
        """Before the first backward: every one will bring the same gradients, a parameter's as often as the first."""
        self._static = True
        self._native.hooks.set_static_graph()

    def begin_forward(self, lockstep: bool) -> None:
        """Before each forward; `lockstep`: on every rank, and so is its backward.

        Raises:
            UsageError: on every rank, if one has left out a parameter in the backward before; out of lockstep on that
                rank alone. The text of a rank that has left out nothing lists what the others have.
        """
        if self._native.hooks.left_out_somewhere and (self.require_used or self._static):
            raise self._error()
        self._native.hooks.begin_forward()
        self._lockstep = lockstep

    def _error(self) -> UsageError:
        rank, names = self._control.rank, list(self._named)
        trained = [name for name, param in self._named.items() if param.requires_grad]
        missing = [names[index] for index in sorted(self._native.hooks.left_out)]
        debugging = dist.get_debug_level() != dist.DebugLevel.OFF
        numbers = " ".join(str(trained.index(name)) for name in missing)
        lines = f"\nParameter indices which did not receive grad for rank {rank}: {numbers}"
        if debugging:
            lines = f"\nParameters which did not receive grad for rank {rank}: {', '.join(missing)}{lines}"
        own = lines if missing else ""
        every = gather_texts(self._control, own) if self._lockstep else [own]
        return UsageError(
            (_CHANGED if self._static else _UNUSED) + (own or "".join(every)) + ("" if debugging else _ADVICE)
        )
