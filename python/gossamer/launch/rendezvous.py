# How torch's agents of `gossamer run` meet: the agent of the first host serves a store, and the workers of all hosts
# use that store too. It takes the place of torchrun's backends "c10d" and "static": their stores listen on every
# address, and agents of "c10d" unpickle what they read there. here.py uses it for one host, agent.py for several.
# A user who gives a rendezvous of torchrun's gets that one.
"""The rendezvous of `gossamer run`."""

import argparse
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from gossamer import stores

BACKEND = "gossamer"


class Rendezvous(RendezvousHandler):
    """The meeting of the agents of a fixed list of hosts."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        address, _, port = parameters.endpoint.rpartition(":")
        self._address, self._port, self._run_id = address, int(port), parameters.run_id
        self._size, self._rank = parameters.max_nodes, int(parameters.get("rank"))
        self._timeout = timedelta(seconds=int(parameters.get("timeout")))
        self._store: dist.Store | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens a new store: that of the attempt before holds what its workers have written."""
        if self._rank == 0:
            store = stores.serve(self._address, self._port, world_size=self._size, timeout=self._timeout)
        else:
            store = dist.TCPStore(self._address, self._port, self._size, False, timeout=self._timeout)
        self._store = store
        where = RendezvousStoreInfo(self._address, store.port)
        return RendezvousInfo(dist.PrefixStore(self._run_id, store), self._rank, self._size, where)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass  # no host can come later

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._store = None
        return True


def choose(args: argparse.Namespace, *, address: str, port: int, timeout_s: int) -> None:
    """Makes torchrun's agent meet here, on this address. The first host's agent listens there.

    Args:
        args: torchrun's arguments. node_rank and nnodes say which host this is, and how many there are. node_rank
            then becomes 0, because torchrun warns of any other one for backends that are not its own.
        port: 0 for a free one, which only one host alone can have.
        timeout_s: for all hosts to come.
    """
    rendezvous_handler_registry.register(BACKEND, Rendezvous)
    args.rdzv_backend, args.rdzv_endpoint = BACKEND, f"{address}:{port}"
    args.rdzv_conf = ",".join(
        filter(None, [f"timeout={timeout_s}", args.rdzv_conf, f"rank={args.node_rank}"])
    )
    args.node_rank = 0
