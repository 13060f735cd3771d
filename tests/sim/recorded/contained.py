"""What a run really contains: each function here says of one thing whether it is in a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import Plan
from shoal.dag.plan.routes import swaps
from shoal.dag.transforms.vocabulary import planned_graph
from shoal.proto.broker_pb2 import RunEvent

Seen = tuple[Any, list[Plan], Sequence[RunEvent]]
"""The captured graph, the plans that the run had, and its events."""


def pipeline(schedule: str, stages: int = 3) -> Callable[[Seen], bool]:
    """One pipeline of so many stages, each on a peer of its own."""

    def found(seen: Seen) -> bool:
        (plan,) = seen[1]
        return plan.schedule == schedule and len(plan.stages) == len(plan.peers) == stages

    return found


def interleaved(seen: Seen) -> bool:
    """Some peer has several stages that are no neighbours."""
    (plan,) = seen[1]
    of = [plan.stages_of(peer) for peer in plan.peers]
    return plan.schedule == "interleaved" and any(b - a > 1 for a, b, *_ in filter(_two, of))


def _two(stages: Sequence[int]) -> bool:
    return len(stages) > 1


def recomputes(seen: Seen) -> bool:
    (plan,) = seen[1]
    return len(plan.stages) == 3 and all(s.recompute for s in plan.stages)


def split_head(seen: Seen) -> bool:
    (plan,) = seen[1]
    return plan.head_parts > 1 and len(plan.peers) > 1


def tied(seen: Seen) -> bool:
    """Some parameter lies with several peers, which add up its gradients on their links."""
    graph, (plan,), events = seen
    form = planned_graph(graph.bind(plan.microbatch_size), plan)
    groups = tied_groups(form, cut(form, [(s.start, s.stop) for s in plan.stages]))
    holders = {p for g in groups for k in g.stages for p in plan.stages[k].holders}
    return len(holders) > 1 and "sync" in roles_of(events)


def roles_of(events: Sequence[RunEvent]) -> set[str]:
    """Of what was sent in steps."""
    return {link.role for e in events if e.HasField("step") for link in e.step.links}


def lossy(*roles: str) -> Callable[[Seen], bool]:
    """Frames of these roles are planned to lose something, and are sent."""

    def found(seen: Seen) -> bool:
        _, (plan,), events = seen
        lose = {c.role for c in plan.codecs if not c.codec.startswith(("raw", "none", "lossless"))}
        return set(roles) <= lose & roles_of(events)

    return found


def several(holders: int, collective: str = "", strategy: str = "mean") -> Callable[[Seen], bool]:
    """Each stage has so many holders, that add up gradients by this."""

    def found(seen: Seen) -> bool:
        (plan,) = seen[1]
        exchanges = [plan.exchange_of(k) for k in range(len(plan.stages))]
        return all(len(s.holders) == holders for s in plan.stages) and all(
            e.collective == (collective or e.collective) and e.strategy.startswith(strategy)
            for e in exchanges
        )

    return found


def recovers(rung: str) -> Callable[[Seen], bool]:
    """A second term began, and a note names what was done."""

    def found(seen: Seen) -> bool:
        notes = " ".join(e.note or e.state.reason.text for e in seen[2])
        return max(e.term for e in seen[2]) > 1 and rung in notes

    return found


def changes_places(seen: Seen) -> bool:
    """Stages change places, and a lost one is a copy of the one that it changes places with."""
    return bool(swaps(seen[1][0])) and recovers("made anew")(seen)


def meets(pairs: bool) -> Callable[[Seen], bool]:
    """All rounds are committed, of pairs or of all."""

    def found(seen: Seen) -> bool:
        events = seen[2]
        done = [e.round_done for e in events if e.HasField("round_done")]
        return len(done) > 1 and pairs == any(m.group for d in done for m in d.members)

    return found
