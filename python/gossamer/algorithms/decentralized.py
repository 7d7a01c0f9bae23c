"""Decentralized averaging: ranks average their weights with a few peers while forward and backward run.

It follows Bagua's algorithm of that name (D-PSGD: Lian et al. 2017, arXiv:1705.09056), with any number of ranks and
with graphs that change. Ranks hold different weights: model.consensus() averages them exactly.
"""

from typing import Any, ClassVar

from gossamer import _C
from gossamer.algorithms.base import Algorithm, average_with_peers, job_with_peers, require_steps
from gossamer.comm import Communicator
from gossamer.engine import Worker
from gossamer.facts import APART, Job, Messages, Method, Traffic, Trial
from gossamer.topology import TOPOLOGIES, Topology, resolve


class Decentralized(Algorithm):
    """x <- avg(x) - lr * g(x): the peers' mean of the weights before the step, then the optimizer's own update.

    The gradient is that of the weights before averaging, so they travel while forward and backward run.

    Args:
        topology: who averages with whom: a Topology, or its name in gossamer.topology.TOPOLOGIES.
        interval: optimizer steps from one averaging to the next. The first step averages.
    """

    name = "decentralized"
    methods: ClassVar[tuple[Method, ...]] = tuple(
        Method(
            "decentralized" if name == "all" else f"decentralized_{name}",
            lambda _, name=name: Decentralized(name),  # type: ignore[misc]
            APART,
            "averages weights of before the step, with all ranks"
            if name == "all"
            else "averages weights with a few peers instead of gradients with all, so ranks hold different weights",
            "decentralized.md",
            trial=Trial(apart=True) if name in ("all", "one_peer_exponential") else None,
        )
        for name in TOPOLOGIES
    )
    fields: ClassVar[tuple[str, ...]] = ("weight",)
    needs_optimizer = True

    def __init__(self, topology: str | Topology = "all", interval: int = 1) -> None:
        require_steps("Decentralized", interval=interval)
        self.topology: Topology = resolve(topology)
        self.interval: int = interval

    def connect(self, worker: Worker) -> None:
        super().connect(worker)
        self._rounds = 0  # averagings so far, which is the topology's step
        self._sent: list[_C.Bucket] = []  # the buckets whose average is under way

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        self._comm, self._buckets = comm, buckets
        for bucket in buckets:
            for field in ("snapshot", "mixed"):
                bucket.add_field(field, comm)

    def before_forward(self, step: int) -> None:
        self.before_backward(step)

    def before_backward(self, step: int) -> None:
        if self._sent or step % self.interval or self.alone:
            return
        self._sent = self._buckets
        for bucket in self._sent:
            bucket.flat("snapshot").copy_(bucket.flat("weight"))
            self.submit(bucket, self._mix)

    def _mix(self, bucket: _C.Bucket) -> None:
        snapshot, mixed = bucket.flat("snapshot"), bucket.flat("mixed")
        average_with_peers(self.topology, self._comm, snapshot, mixed, step=self._rounds)

    def before_step(self, step: int) -> None:
        if not self._sent:
            return
        self.wait()
        for bucket in self._sent:
            # The mean is added and not copied, because another optimizer or a closure may have changed the weights.
            bucket.flat("weight").add_(bucket.flat("mixed").sub_(bucket.flat("snapshot")))
        self._sent = []
        self._rounds += 1

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        jobs = [job_with_peers(self.topology, bucket.nbytes, messages) for bucket in messages.buckets]
        share = 1 / self.interval
        scaled = [Job(job.cost.times(share), job.cpu_s * share) for job in jobs]
        return Traffic(from_start=scaled, in_backward=messages.finite())

    def settle(self) -> None:
        """Forgets the average under way, which is of the weights before."""
        self._sent = []

    def why_not_elastic(self) -> str:
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self._rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rounds = state["rounds"]
