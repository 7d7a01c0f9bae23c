# Named operations (gossamer.comm.open_named's) with ranks as threads. Not a test file.
"""`run_named(size, body)` calls body(named) on every rank, over connections of a kind and a control channel."""

from datetime import timedelta

import torch.distributed as dist

from gossamer import _C
from gossamer import comm as gossamer_comm
from tests.support.ranks import TIMEOUT_S, run_threads

KINDS = {"gossamer": _C.GossamerBackend, "gloo": dist.ProcessGroupGloo}
# The backends of data and of the negotiation: "host" is shared memory, "gloo" crosses hosts. "two hosts" is Gloo too,
# and sums go by hosts, each with half of the ranks.
PLACES = [
    ("gossamer", "host"),
    ("gloo", "host"),
    ("gossamer", "gloo"),
    ("gloo", "gloo"),
    ("gloo", "two hosts"),
]


def run_named(size, body, *, data="gossamer", control="host", comms=None, errors=False, **options):
    """body(named) on every rank. `comms`: a dict that gets the communicators of the data, by rank."""
    store = dist.HashStore()
    kept = []  # until all ranks are done

    def rank_body(rank):
        def connect(kind, name, timeout):
            return KINDS[kind](dist.PrefixStore(name, store), rank, size, timeout)

        own = dist.PrefixStore("data", store)
        backend = connect(data, "data", timedelta(seconds=TIMEOUT_S))
        comm = gossamer_comm.from_backend(backend, store=own, name="data")
        if control == "two hosts" and size > 1:
            comm = gossamer_comm.hierarchy(comm, [list(range(size // 2)), list(range(size // 2, size))])
        near = None
        if control == "host":
            channel = connect("gossamer", "control", timedelta(seconds=TIMEOUT_S))
            near = gossamer_comm.from_backend(channel, name="near") if data == "gloo" else None
        else:
            channel = connect("gloo", "control", timedelta(days=365))
        settings = vars(gossamer_comm.NamedOptions(**options)).copy()
        del settings["by_hosts"]  # open_named() does so
        named = _C.NamedCollectives(channel, {"cpu": comm}, list(range(size)), near=near, **settings)
        kept.append((named, comm))
        if comms is not None:
            comms[rank] = comm
        try:
            return body(named)
        finally:
            named.shutdown()

    return run_threads(size, rank_body, errors=errors)


def result(named, kind, tensor, name, **arguments):
    """The output of one operation."""
    (operation,) = named.submit(kind, [tensor], names=[name], **arguments)
    operation.wait()
    return operation.output
