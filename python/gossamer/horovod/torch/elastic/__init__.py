"""``hvd.elastic``: elastic training of torch models by ``run``, ``TorchState`` and ``ElasticSampler``.

The loop is in horovod/common/elastic.py; state.py and sampler.py have the states.
"""

from collections.abc import Callable
from typing import Any

from gossamer.horovod.common.elastic import ObjectState, State, run_fn
from gossamer.horovod.torch.elastic.sampler import ElasticSampler
from gossamer.horovod.torch.elastic.state import TorchState
from gossamer.horovod.torch.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is a State, such as a TorchState.

    Call the function after hvd.init(). It begins with rank 0's state on all workers, continues from where the state
    says, and calls state.commit() from time to time. When a worker dies, the others return to the last commit and call
    the function again in a smaller group. When a worker is added, all call it again at the next commit. Exceptions
    other than HorovodInternalError and HostsUpdatedInterrupt pass through.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
