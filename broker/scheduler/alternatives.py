"""What a plan is compared with: the best single peer alone, and whole replicas with local steps.

**Alone.** A peer runs every microbatch one after another (accumulation). Where that does not fit,
it recomputes in segments: between them only the values that cross are kept (Chen et al. 2016,
arXiv:1604.06174). Where that does not fit either, parameters, gradients and optimizer state lie on
the host and pass through the device once per forward and once per backward and gradient:

    step = M · (2 F + B) + M · 3 · parameter bytes / HOST_LINK + update on the host

Host offload is for comparison only: Shoal does not execute it.

**Replicas.** Every peer that can hold the whole model trains on a share of the batch in proportion
to its speed; every H steps all exchange their weights once (local steps, as in DiLoCo,
arXiv:2311.08105):

    step = batch / Σ_p (samples/s of p) + 2 · parameter bytes / (slowest rate) / H + latency / H

The weights then differ between exchanges: it is another training, and said so.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...dag.plan import Alternative
from ...dag.speed import Work
from .candidate import Candidate, Share
from .interface import PeerOffer
from .judge import Judge

__all__ = ["ALONE", "HOST_LINK_BYTES_PER_S", "LOCAL_STEPS", "REPLICAS", "alone", "replicas"]

ALONE = "best single peer"
REPLICAS = "whole replicas"
HOST_LINK_BYTES_PER_S = 1e10
"""Between host and card: what a PCIe 3.0 slot of 16 lanes gives in practice."""
HOST_BYTES_PER_S = 1e10
"""Memory traffic of an optimizer on the host's cores."""
LOCAL_STEPS = 100
"""Steps between two exchanges of whole replicas."""
SEGMENTS = (4, 8, 16, 32)
"""Numbers of segments that recomputation is tried with."""


@dataclass(frozen=True, slots=True)
class _Alone:
    """How fast a peer is by itself, and by what means."""

    peer: int
    step_s: float
    means: str
    executable: bool


def alone(judge: Judge) -> Alternative:
    """The best single peer for the same samples."""
    found = [a for p in range(len(judge.offers)) if (a := _alone(judge, p)) is not None]
    if not found:
        needed = judge.stage_bytes(0, judge.operators, 1)
        most = max(judge.offers, key=lambda o: o.device_memory_bytes)
        return Alternative(
            ALONE,
            0.0,
            f"no peer can train it alone, with recomputation and host offload: it needs "
            f"{needed / 2**30:.2f} GiB, the largest ({most}) offers "
            f"{most.device_memory_bytes / 2**30:.2f} GiB",
        )
    best = min(found, key=lambda a: a.step_s)
    offer = judge.offers[best.peer]
    means = f" with {best.means}" if best.means else ""
    note = "" if best.executable else " (for comparison: offload is not executed here)"
    count = judge.request.microbatches
    return Alternative(
        ALONE, best.step_s, f"{offer} alone, {count} microbatches one after another{means}{note}"
    )


def _alone(judge: Judge, peer: int) -> _Alone | None:
    n, m = judge.operators, judge.request.microbatches
    whole = Candidate(((Share(peer, 0, n),),), (m,))
    if judge.fits(whole):
        return _Alone(peer, judge.seconds(whole), "", True)
    for segments in SEGMENTS:
        if segments > n:
            break
        cuts = judge.even_cuts(segments)
        shares = tuple(Share(peer, a, b, True) for a, b in pairwise(cuts))
        again = Candidate((shares,), (m,))
        if judge.fits(again):
            means = f"recomputation in {segments} segments"
            return _Alone(peer, judge.seconds(again), means, True)
    return _offloaded(judge, peer)


def _offloaded(judge: Judge, peer: int) -> _Alone | None:
    """State on the host, one segment at a time on the device."""
    offer, request = judge.offers[peer], judge.request
    n, m = judge.operators, request.microbatches
    segments = min(n, SEGMENTS[-1])
    cuts = judge.even_cuts(segments)
    spans = list(pairwise(cuts))
    parameters = sum(c.parameter_bytes for c in judge.costs)
    on_device = max(judge.stage_bytes(a, b, 1) for a, b in spans) + sum(
        judge.crossing_bytes(a) for a, _ in spans
    )
    on_host = parameters * (2 + request.options.optimizer_slots)
    if on_device > offer.device_memory_bytes or on_host > offer.host_memory_bytes:
        return None
    forward, backward = judge.totals.work(0, n)
    each = offer.pace.seconds(Work(*(2 * f + b for f, b in zip(forward, backward, strict=True))))
    moved = 3 * parameters / HOST_LINK_BYTES_PER_S
    update = (5 + 2 * request.options.optimizer_slots) * parameters / HOST_BYTES_PER_S
    return _Alone(peer, m * (each + moved) + update, "recomputation and host offload", False)


def replicas(judge: Judge) -> Alternative:
    """Whole replicas that take local steps, over all peers that can hold one."""
    found = []
    for p in range(len(judge.offers)):
        one = _alone(judge, p)
        if one is not None and one.executable:
            found.append(one)
    if len(found) < 2:
        count = "no peer" if not found else f"only {judge.offers[found[0].peer]}"
        return Alternative(REPLICAS, 0.0, f"{count} can hold the whole model")
    # The faster ones first; another replica helps while its link does not cost more than it adds.
    found.sort(key=lambda a: (a.step_s, a.peer))
    parameters = sum(c.parameter_bytes for c in judge.costs)
    rates = judge.network.rates()
    best, chosen = float("inf"), found[:1]
    for count in range(2, len(found) + 1):
        some = [a.peer for a in found[:count]]
        compute = 1 / sum(1 / a.step_s for a in found[:count])
        slowest = min(float(rates[i, j]) for i in some for j in some if i != j)
        latency = max(float(judge.network.latency_s[i, j]) for i in some for j in some if i != j)
        step = compute + (2 * parameters / slowest + latency) / LOCAL_STEPS
        if step < best:
            best, chosen = step, found[:count]
    names = _names([judge.offers[a.peer] for a in chosen])
    return Alternative(
        REPLICAS,
        best,
        f"{len(chosen)} whole replicas ({names}) with {LOCAL_STEPS} local steps between exchanges: "
        "another training than one model, step by step",
    )


def _names(offers: list[PeerOffer]) -> str:
    shown = ", ".join(str(o) for o in offers[:4])
    return shown if len(offers) <= 4 else f"{shown} and {len(offers) - 4} more"
