"""The first rung of the ladder: the other holders of a lost one's stages do its microbatches.

Nothing is fetched and no committed step is done again: everybody goes on from what is in its stages
now, and begins the step that was lost anew, over other routes. That is possible where nobody has
applied that step yet, which each holder knows best: one that has says so, and the run goes back to
a snapshot instead.

Pure functions over plans. After ReCycle (arXiv 2405.14009, section 3) and SWARM (arXiv 2301.11913).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from ...dag.plan.cut import bare_stages
from ...dag.plan.plan import PeerId, Plan, Route, Visit
from ...dag.schedule.schedule import listed
from .view import Pair

__all__ = ["rerouted", "rerouted_pairs"]


def rerouted(plan: Plan, gone: Container[PeerId]) -> Plan | None:
    """The plan without these holders, their microbatches spread evenly over the other holders of
    the same stages; None where one of them was the last, and where holders have something of their
    own that the others cannot go on without."""
    if plan.has_own_state:
        return None
    stages = tuple(
        replace(s, holders=tuple(h for h in s.holders if h not in gone)) for s in plan.stages
    )
    if not all(s.holders for s in stages):
        return None
    load = {(k, h): 0 for k, s in enumerate(stages) for h in s.holders}
    for route in plan.routes:
        for visit in route:
            if (visit.stage, visit.peer) in load:
                load[visit.stage, visit.peer] += 1

    def instead(visit: Visit) -> Visit:
        if visit.peer not in gone:
            return visit
        holders = stages[visit.stage].holders
        peer = min(holders, key=lambda h: (load[visit.stage, h], holders.index(h)))
        load[visit.stage, peer] += 1
        return replace(visit, peer=peer)

    def moved(routes: tuple[Route, ...]) -> tuple[Route, ...]:
        return tuple(tuple(map(instead, route)) for route in routes)

    routes = moved(plan.routes)
    load = dict.fromkeys(load, 0)
    full = plan.full
    if full is not None:  # the same holders as in the other steps, where those have one
        own = [{v.stage: v for v in route} for route in routes]
        both = zip(full.routes, own, strict=True)
        full = replace(
            full, routes=tuple(tuple(at.get(v.stage) or instead(v) for v in r) for r, at in both)
        )
        load = dict.fromkeys(load, 0)
    left = replace(
        plan,
        stages=stages,
        routes=routes,
        full=full,
        evaluation_routes=moved(plan.evaluation_routes),
        # Those among who is left begin anew: rows, places and shares were of all.
        exchanges=tuple(
            e for e in plan.exchanges if stages[e.stage].holders == plan.stages[e.stage].holders
        ),
        codecs=tuple(c for c in plan.codecs if c.source not in gone and c.destination not in gone),
        keepers=(),
    )
    return listed(left, bare_stages(left))


def rerouted_pairs(plan: Plan, pairs: Iterable[Pair], gone: Container[PeerId]) -> tuple[Pair, ...]:
    """Return the pairs that may exchange frames under the rerouted plan: whoever did, and the other
    holders of a stage with those that its lost one talked to."""
    found: dict[frozenset[PeerId], Pair] = {}
    others = {
        h: [o for s in plan.stages if h in s.holders for o in s.holders if o not in gone]
        for h in plan.peers
    }
    for a, b in pairs:
        for x in others[a] if a in gone else [a]:
            for y in others[b] if b in gone else [b]:
                if x != y:
                    found.setdefault(frozenset((x, y)), (x, y))
    return tuple(found.values())
