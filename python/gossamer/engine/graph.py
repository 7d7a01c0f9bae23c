"""Torch DDP's rules about the parameters that a backward must reach, and its error for parameters that it does not.

The error has torch's text word for word, because programs search for it. engine.py owns one Graph.
"""

import torch.distributed as dist

from gossamer import _C
from gossamer.engine.agree import gather_texts
from gossamer.engine.buckets import Buckets
from gossamer.engine.parts import Parts
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
    """The rules for the backwards of one engine. By default there is none."""

    def __init__(self, native: _C.Engine, parts: Parts, buckets: Buckets) -> None:
        self._native, self._control, self._named, self._buckets = native, parts.control, parts.named, buckets
        self._static = False
        #: Whether a parameter without a gradient is an error in the next forward.
        self.require_used = False
        self._lockstep = True  # whether all ranks took part in the previous backward, and know the same

    def use_static(self) -> None:
        """Require that every backward brings the same gradients as the first one. Call it before the first backward."""
        self._static = True
        self._native.hooks.set_static_graph()

    def begin_forward(self, lockstep: bool) -> None:
        """Check the previous backward. Called before each forward.

        Args:
            lockstep: all ranks make this forward and its backward together.

        Raises:
            UsageError: a parameter was left out in the previous backward. In lockstep every rank raises, and a rank
                that left out nothing lists the parameters of the others.
        """
        if self._native.hooks.left_out_somewhere and (self.require_used or self._static):
            raise self._error()
        self._native.hooks.begin_forward()
        self._lockstep = lockstep

    def _error(self) -> UsageError:
        rank, names = self._control.rank, list(self._named)
        planned = {name for bucket in self._buckets.names for name in bucket}
        trained = [name for name in names if name in planned]  # frozen since, perhaps
        missing = [names[index] for index in sorted(self._native.hooks.left_out)]
        debugging = dist.get_debug_level() != dist.DebugLevel.OFF
        numbers = " ".join(str(trained.index(name)) for name in missing)
        lines = f"\nParameter indices which did not receive grad for rank {rank}: {numbers}"
        if debugging:
            lines = f"\nParameters which did not receive grad for rank {rank}: {', '.join(missing)}{lines}"
        own = lines if missing else ""
        if self._lockstep:
            self._native.worker.wait()  # whose operations may use the same connections
        every = gather_texts(self._control, own) if self._lockstep else [own]
        return UsageError(
            (_CHANGED if self._static else _UNUSED) + (own or "".join(every)) + ("" if debugging else _ADVICE)
        )
