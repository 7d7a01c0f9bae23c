"""torch's own DistributedDataParallel on ranks that are threads, without a default group. Not a test file."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossamer import comm as gossamer_comm
from gossamer import hooks
from tests.support.models import batches, flat_weights, mlp, seeded, shard
from tests.support.ranks import TIMEOUT_S, run_threads
from tests.support.stock import gloo_group

LONGEST = 6  # steps of a run
SMALL_MB = 400 / 2**20  # several buckets, and others after the first step


def run_ddp(size: int, body: Callable[[Any, Any], Any], *, errors: bool = False) -> list:
    """body(DDP's process group, a communicator for its hook) once per rank; results in rank order."""
    store = dist.HashStore()
    kept: list[Any] = []  # until all ranks are done

    def rank_body(rank: int) -> Any:
        group = gloo_group(store, rank, size)
        own = dist.PrefixStore("hook", store)
        backend = dist.ProcessGroupGloo(own, rank, size, timedelta(seconds=TIMEOUT_S))
        comm = gossamer_comm.from_backend(backend, store=own, name="hook")
        kept.append(comm)
        return body(group, comm)

    return run_threads(size, rank_body, errors=errors)


class Training:
    """Stock DDP around `build()` with a hook of ours and SGD with momentum."""

    def __init__(
        self,
        group: Any,
        comm: Any,
        hook: Callable[..., Any] | None,
        *,
        build: Callable[[], nn.Module] = mlp,
        native: bool = False,
        bucket_cap_mb: float = SMALL_MB,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.comm, self.model = comm, seeded(build)
        self.ddp = DistributedDataParallel(
            self.model, process_group=group, bucket_cap_mb=bucket_cap_mb, **(options or {})
        )
        if hook is not None:
            self.state = hooks.State(self.ddp, process_group=comm, **settings)
            if native:
                hooks.register(self.ddp, self.state, hook)
            else:
                self.ddp.register_comm_hook(self.state, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, batch: Tensor, **arguments: Any) -> None:
        self.optimizer.zero_grad()
        self.ddp(shard(batch, self.comm), **arguments).square().mean().backward()
        self.optimizer.step()

    def run(self, steps: range = range(LONGEST)) -> Tensor:
        every = batches(LONGEST)  # a shorter one would not begin with the same numbers
        for step in steps:
            self.step(every[step])
        return flat_weights(self.model)
