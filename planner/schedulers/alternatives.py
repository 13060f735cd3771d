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

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...dag.cost.speed import Work
from ...dag.plan.report import Alternative
from ...job.words import size_text, some_of
from ..base.interface import PeerOffer
from ..cost.candidate import Candidate, StageShare
from ..cost.cost_model import CostModel

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


def alone(judge: CostModel) -> Alternative:
    """The best single peer for the same samples."""
    found = _singles(judge)
    if not found:
        needed = judge.stage_bytes(0, judge.operators, 1)
        most = max(judge.offers, key=lambda o: o.device_memory_bytes)
        return Alternative(
            ALONE,
            0.0,
            f"no peer can train it alone, with recomputation and host offload: it needs "
            f"{size_text(needed)}, the largest ({most}) offers "
            f"{size_text(most.device_memory_bytes)}",
        )
    best = min(found, key=lambda a: a.step_s)
    offer = judge.offers[best.peer]
    means = f" with {best.means}" if best.means else ""
    note = "" if best.executable else " (for comparison: offload is not executed here)"
    count = judge.request.microbatches
    return Alternative(
        ALONE, best.step_s, f"{offer} alone, {count} microbatches one after another{means}{note}"
    )


def _singles(judge: CostModel) -> list[_Alone]:
    """By peer that can hold it by some means, the first of them that it can."""
    n = judge.operators
    rooms = np.array([o.device_memory_bytes for o in judge.offers], np.int64)
    left = np.ones(len(rooms), dtype=bool) if not judge.request.beside else judge.may_have.copy()
    found: list[_Alone] = []
    for segments in (1, *(s for s in SEGMENTS if s <= n)):
        cuts = judge.even_cuts(segments)
        shares = tuple(StageShare(0, a, b, segments > 1) for a, b in pairwise(cuts))
        if not left.any():
            break
        # A peer alone takes its microbatches one after another: what it keeps is the same for two
        # as for more, and each from the second on adds equally many seconds.
        one, two = (Candidate((shares,), (m,)) for m in (1, 2))
        count = judge.request.microbatches
        (needed,) = judge.device_bytes(two if count > 1 else one).values()
        able = np.flatnonzero(left & (rooms >= needed))
        if not len(able):
            continue
        seconds = judge.bound_many(one, able[:, None])
        if count > 1:
            seconds = seconds + (count - 1) * (judge.bound_many(two, able[:, None]) - seconds)
        left[able] = False
        means = f"recomputation in {segments} segments" if segments > 1 else ""
        for p, s in zip(able.tolist(), seconds.tolist(), strict=True):
            found.append(_Alone(p, s * _crowding(judge.offers[p]), means, True))
    if left.any():
        found += _offloaded(judge, np.flatnonzero(left).tolist())
    return sorted(found, key=lambda a: a.peer)


def _crowding(offer: PeerOffer) -> float:
    """How many times longer an action takes on a machine with fewer cores than threads."""
    if offer.host and offer.cores and offer.threads:
        return max(1.0, offer.threads / offer.cores)
    return 1.0


def _offloaded(judge: CostModel, peers: list[int]) -> Iterator[_Alone]:
    """State on the host, one segment at a time on the device."""
    request = judge.request
    n, m = judge.operators, request.microbatches
    spans = list(pairwise(judge.even_cuts(min(n, SEGMENTS[-1]))))
    parameters = sum(c.parameter_bytes for c in judge.costs)
    whole = judge.memory.stage(0, n)
    on_device = max(judge.stage_bytes(a, b, 1) for a, b in spans) + sum(
        judge.crossing_bytes(a) for a, _ in spans
    )
    on_host = whole.standing(request.options.state_bytes)
    forward, backward = judge.totals.work(0, n)
    work = Work(*(2 * f + b for f, b in zip(forward, backward, strict=True)))
    moved = (2 * parameters + whole.trainable) / HOST_LINK_BYTES_PER_S
    update = (5 + 2 * request.options.optimizer_slots) * whole.trainable / HOST_BYTES_PER_S
    for p in peers:
        offer = judge.offers[p]
        if on_device <= offer.device_memory_bytes and on_host <= offer.host_memory_bytes:
            each = offer.pace.seconds(work)
            yield _Alone(p, m * (each + moved) + update, "recomputation and host offload", False)


def replicas(judge: CostModel) -> Alternative:
    """Whole replicas that take local steps, over all peers that can hold one."""
    found = [a for a in _singles(judge) if a.executable]
    if len(found) < 2:
        count = "no peer" if not found else f"only {judge.offers[found[0].peer]}"
        return Alternative(REPLICAS, 0.0, f"{count} can hold the whole model")
    # The faster ones first; another replica helps while its link does not cost more than it adds.
    found.sort(key=lambda a: (a.step_s, a.peer))
    parameters = sum(c.parameter_bytes for c in judge.costs)
    peers = [a.peer for a in found]
    grid = np.ix_(peers, peers)
    slowest, latency = judge.rates[grid], judge.network.latency_s[grid]
    best, chosen = float("inf"), found[:1]
    narrow, late, speed = float("inf"), 0.0, 1 / found[0].step_s
    for k in range(1, len(found)):
        narrow = min(narrow, float(slowest[k, :k].min()), float(slowest[:k, k].min()))
        late = max(late, float(latency[k, :k].max()), float(latency[:k, k].max()))
        speed += 1 / found[k].step_s
        step = 1 / speed + (2 * parameters / narrow + late) / LOCAL_STEPS
        if step < best:
            best, chosen = step, found[: k + 1]
    names = some_of([str(judge.offers[a.peer]) for a in chosen])
    return Alternative(
        REPLICAS,
        best,
        f"{len(chosen)} whole replicas ({names}) with {LOCAL_STEPS} local steps between exchanges: "
        "another training than one model, step by step",
    )
