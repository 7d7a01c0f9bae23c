# Elastic training of torch models: Horovod's horovod.torch.elastic. The loop is common/elastic.py, the states state.py.
# Who is in the group is the business of gossamer.membership and of `gossamer run --min-np`.
"""``hvd.elastic``: ``run``, ``TorchState``, ``ElasticSampler``."""

from collections.abc import Callable
from typing import Any

from gossamer.horovod.common.elastic import ObjectState, State, run_fn
from gossamer.horovod.torch.elastic.sampler import ElasticSampler
from gossamer.horovod.torch.elastic.state import TorchState
from gossamer.horovod.torch.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is a State, such as a TorchState.

    The function is called after hvd.init(). It begins with rank 0's state on all workers, must go on from where the
    state says, and calls state.commit() from time to time. When a worker dies, the others go back to the last commit
    and call it again in a smaller group; when one is added, all call it again at the next commit. Its return value is
    returned; other exceptions than HorovodInternalError and HostsUpdatedInterrupt pass through.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
