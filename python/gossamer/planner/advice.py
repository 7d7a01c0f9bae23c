# The numbers come from predict.py, the words about each method from methods.py. Callers: the command.
"""Advises the method that changes a training least among those that are quick enough, and warns about the inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.facts import APART, COMPRESSED, EXACT, KINDS, ROUNDED
from gossamer.planner.methods import METHODS
from gossamer.planner.network import Network, all_ranks
from gossamer.planner.predict import Prediction
from gossamer.planner.problem import Problem, buckets_of
from gossamer.planner.reduction import Reducer
from gossamer.units import bytes_text, seconds_text

#: The first kind is advised whose best step is at most SLACK times the best synchronous step. Methods whose ranks go
#: apart are advised only if the best synchronous step is more than APART_GAIN times as long as theirs.
SLACK = {EXACT: 1.10, ROUNDED: 1.25, COMPRESSED: 1.0}
APART_GAIN = 3.0
_NEAR = 1.05  # among methods of a kind within this factor of its best step, the first in METHODS is advised
_WORDS = {
    EXACT: "It is exact",
    ROUNDED: "It is synchronous, with rounded gradients",
    COMPRESSED: "It is synchronous, and lossy in each step",
}


@dataclass(frozen=True)
class Advice:
    """`use`: a name in METHODS, or "" if there is no choice. `why`: sentences. `warnings`: a list of sentences."""

    use: str
    why: str
    warnings: list[str]


def advise(problem: Problem, network: Network, predictions: Sequence[Prediction]) -> Advice:
    """Advises one of Gossamer's own methods among the predictions."""
    own = [p for p in predictions if METHODS[p.algorithm].advised]
    warnings = _warnings(problem, network)
    if not own:
        return Advice("", "None of Gossamer's methods was compared.", warnings)
    chosen = _choose(own)
    return Advice(chosen.algorithm, _why(chosen, own, predictions), warnings)


def _choose(own: Sequence[Prediction]) -> Prediction:
    by_kind = {kind: [p for p in own if METHODS[p.algorithm].kind == kind] for kind in KINDS}
    best_s = {kind: min(p.step_s for p in same) for kind, same in by_kind.items() if same}
    apart_s = best_s.pop(APART, math.inf)
    chosen = APART
    if best_s and min(best_s.values()) <= APART_GAIN * apart_s:
        least_s = min(best_s.values())
        chosen = next(kind for kind in best_s if best_s[kind] <= SLACK[kind] * least_s)
    near = [p for p in by_kind[chosen] if p.step_s <= _NEAR * {**best_s, APART: apart_s}[chosen]]
    return min(near, key=lambda p: list(METHODS).index(p.algorithm))


def _why(chosen: Prediction, own: Sequence[Prediction], all_of_them: Sequence[Prediction]) -> str:
    method = METHODS[chosen.algorithm]
    sentences = [
        f"Use {chosen.algorithm}: {seconds_text(chosen.step_s)} a step, {chosen.efficiency:.0%} of it compute"
    ]
    exact = [p for p in all_of_them if METHODS[p.algorithm].kind == EXACT and p is not chosen]
    if exact and method.kind != EXACT:
        peer = min(exact, key=lambda p: p.step_s)
        times = peer.step_s / chosen.step_s
        sentences[0] += (
            f", {times:.3g} times as quick as {peer.algorithm}, the quickest exact one ({seconds_text(peer.step_s)})"
        )
    sentences.append(f"{_WORDS.get(method.kind, 'Ranks go apart')}: it {method.changes}")
    quickest = min(own, key=lambda p: p.step_s)
    if quickest.step_s < chosen.step_s / 1.005:
        other = METHODS[quickest.algorithm]
        reason = (
            "is of the same kind"
            if other.kind == method.kind
            else f"changes more, because it {other.changes}"
        )
        sentences.append(f"{quickest.algorithm} would take {seconds_text(quickest.step_s)}, but it {reason}")
    sentences.append(f"See docs/{method.page} and docs/which-one.md")
    return ". ".join(sentences) + "."


def _warnings(problem: Problem, network: Network) -> list[str]:
    warnings = []
    if network.ranks % network.hosts:
        warnings.append(
            f"{network.ranks} ranks are not divisible by {network.hosts} hosts: the fullest host has "
            f"{network.per_host}, and its step is predicted; {network.carriers} of each carry what goes between hosts"
        )
    if network.hosts == 1 and network.ranks > 1:
        warnings.append("one host: only the local bandwidth and latency count")
    if network.hosts > 1 and network.local_bandwidth < network.bandwidth / network.per_host:
        warnings.append("a rank's local bandwidth is below its share of the bandwidth between hosts")
    buckets = buckets_of(problem)
    if len(buckets) == 1 and network.ranks > 1:
        warnings.append(
            f"all gradients are in one bucket of {bytes_text(buckets[0].nbytes)}, so nothing is sent during the "
            f"backward; lower bucket_bytes, now {bytes_text(problem.bucket_bytes)}"
        )
    elif network.ranks > 1 and not Reducer(network, problem.speeds).takes_hosts(None):
        typical = sorted(bucket.nbytes for bucket in buckets)[len(buckets) // 2]
        ring = all_ranks(network)
        waiting_s, whole_s = 2 * (ring.size - 1) * ring.latency_s, ring.all_reduce(typical).seconds
        if waiting_s > whole_s / 2:
            warnings.append(
                f"{waiting_s / whole_s:.0%} of a bucket's ring is latency, 2 x {network.ranks - 1} messages one after "
                f"the other; larger buckets, now {bytes_text(problem.bucket_bytes)}, or a codec need fewer"
            )
    return warnings
