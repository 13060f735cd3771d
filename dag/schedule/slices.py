"""What one peer needs of a plan: its slice.

Receive slots follow from the whole plan, for what one peer does when hangs on what all others do.
So whoever has the plan finds them once, for everybody, and a slice says what is to be done: the
peer's visits in their order (I4), the slots of the links to it, and that part of stages, routes,
exchanges and codecs from which `Flow` finds the same transfers as from the plan.

A slice names whom the peer talks to and, of its own stages, all holders; nobody else. It grows with
the microbatches, the stages (two numbers each), and those peers. Two things are kept whole, for
they need it: the norm's hub, who hears of everybody, and routes that leave stages out or visit them
in another order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ..exchange.wiring import hub_of, reports_only
from ..plan.cut import bare_stages
from ..plan.full_steps import FullSteps
from ..plan.plan import CodecChoice, PeerId, Plan, PlanError, Route, StageSlot, Visit
from ..plan.plan_slice import PlanSlice
from ..plan.routes import crossings
from .flow import Flow
from .replay import slots_of

__all__ = ["PlanSlices"]


@dataclass(frozen=True, slots=True)
class _Routes:
    """The routes of one kind of microbatch. mine: by peer, its microbatches and its stages there;
    whole: those that do not visit all stages in order."""

    routes: tuple[Route, ...]
    mine: dict[PeerId, dict[int, list[int]]]
    whole: dict[int, Route]

    @classmethod
    def of(cls, routes: tuple[Route, ...], stages: int) -> _Routes:
        mine: dict[PeerId, dict[int, list[int]]] = {}
        whole: dict[int, Route] = {}
        for m, route in enumerate(routes):
            for visit in route:
                mine.setdefault(visit.peer, {}).setdefault(m, []).append(visit.stage)
            if [v.stage for v in route] != list(range(stages)):
                whole[m] = route
        return cls(routes, mine, whole)

    def slice(
        self, peer: PeerId, columns: Collection[int], beside: list[set[int]]
    ) -> tuple[Route, ...]:
        """Return who else is in the microbatches of a peer at the stages beside its own, and who
        has all microbatches at the stages in `columns`."""
        found: list[Route] = [()] * len(self.routes)
        if columns:
            found = [tuple(v for v in route if v.stage in columns) for route in self.routes]
        for m, stages in self.mine.get(peer, {}).items():
            kept = {*columns, *stages, *(b for k in stages for b in beside[k])}
            found[m] = tuple(v for v in self.routes[m] if v.stage in kept)
        for m, route in self.whole.items():
            found[m] = route
        return tuple(found)


class PlanSlices:
    """The slices of one plan. Raises PlanError for a plan without an outline or lists."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        stages, tied = bare_stages(plan), plan.outline.tied
        if not plan.visits:
            raise PlanError("the plan does not list its visits: nobody could be told its own")
        self._stages, self._tied = stages, tied
        flow = Flow(plan, stages, tied)
        self._lists = dict(zip(plan.peers, plan.visits, strict=True))
        self._evaluations = dict(zip(plan.peers, plan.evaluations, strict=True))
        self._slots: dict[PeerId, list[tuple[PeerId, str, int]]] = {}
        for (source, peer, role), count in slots_of(flow).items():
            if source != peer:
                self._slots.setdefault(peer, []).append((source, role.value, count))
        self._partners: dict[PeerId, set[PeerId]] = {p: set() for p in plan.peers}
        for transfer in flow.taken_by:
            self._partners[transfer.source].add(transfer.destination)
            self._partners[transfer.destination].add(transfer.source)
        self._hub = hub_of(plan, stages)
        self._reports_only = reports_only(plan, stages)
        self._loss = next(s.index for s in stages if s.makes_loss)
        in_order = tuple(Visit(k, PeerId("")) for k in range(len(stages)))
        self._beside: list[set[int]] = [set() for _ in stages]
        for crossing in crossings(stages, in_order):
            self._beside[crossing.source].add(crossing.target)
            self._beside[crossing.target].add(crossing.source)
        self._place = {peer: i for i, peer in enumerate(plan.peers)}
        self._training = _Routes.of(plan.routes, len(stages))
        self._held_out = _Routes.of(plan.evaluation_routes, len(stages))
        self._full = PlanSlices(plan.in_full) if plan.full is not None else None
        self._codecs: dict[PeerId, list[CodecChoice]] = {}
        for choice in plan.codecs:
            for end in (choice.source, choice.destination):
                self._codecs.setdefault(end, []).append(choice)

    @property
    def pairs(self) -> tuple[tuple[PeerId, PeerId], ...]:
        """Pairs of peers that exchange frames, each once, in the order of the plan's peers."""
        place, peers = self._place, self.plan.peers
        found = {
            (place[a], place[b]) for a in peers for b in self._partners[a] if place[a] < place[b]
        }
        return tuple((peers[a], peers[b]) for a, b in sorted(found))

    def of(self, peer: PeerId, known: Iterable[PeerId] = ()) -> PlanSlice:
        """The slice of a holder, or of a peer that keeps snapshots. `known`: others that it has to
        do with, besides those with whom it exchanges frames of a step."""
        plan = self.plan
        own = set(plan.stages_of(peer))
        for group in self._tied:
            own |= set(group.stages) if own & set(group.stages) else set()
        keepers = tuple(k for k in plan.keepers if peer in (k.peer, k.holder))
        near = {peer, *known, *self._partners.get(peer, ())}
        near |= {end for k in keepers for end in (k.peer, k.holder)}
        together = {h for k in own for h in plan.stages[k].holders}
        columns = {k for k in plan.stages_of(peer) if k == self._loss or self._stages[k].statistics}
        part = replace(
            plan,
            stages=tuple(
                s if k in own else _known_of(s, near, self._hub if k == self._loss else None)
                for k, s in enumerate(plan.stages)
            ),
            routes=self._training.slice(peer, columns, self._beside),
            evaluation_routes=self._held_out.slice(peer, columns, self._beside),
            exchanges=tuple(e for e in plan.exchanges if e.stage in own),
            codecs=self._codecs_of(peer, together),
            keepers=keepers,
            outline=type(plan.outline)(),
            visits=(),
            evaluations=(),
            without_norm=self._reports_only,
            full=plan.full and FullSteps(plan.full.before, plan.full.since),
        )
        # Its slots are those of both, which are here.
        full = None if self._full is None else replace(self._full.of(peer, known), slots=())
        return PlanSlice(
            peer,
            part,
            self._lists.get(peer, ()),
            self._evaluations.get(peer, ()),
            tuple(self._slots.get(peer, ())),
            self._place.get(peer, 0),
            self._ring(peer),
            frozenset(self._training.whole),
            full,
        )

    def _codecs_of(self, peer: PeerId, together: set[PeerId]) -> tuple[CodecChoice, ...]:
        """The codecs of its own links; and of those between holders of its stages, since what one
        gives to several has one codec for all of them."""
        found = dict.fromkeys(self._codecs.get(peer, ()))
        for other in together - {peer}:
            for c in self._codecs.get(other, ()):
                if c.role == "sync" and c.source in together and c.destination in together:
                    found[c] = None
        return tuple(found)

    def _ring(self, peer: PeerId) -> tuple[PeerId, ...]:
        """The holders beside it, to whom its snapshots may go when its keeper is gone."""
        peers, at = self.plan.peers, self._place.get(peer)
        if not self.plan.keepers or at is None:
            return ()
        return peers[at - 1], peers[(at + 1) % len(peers)]


def _known_of(slot: StageSlot, near: set[PeerId], hub: PeerId | None) -> StageSlot:
    return StageSlot(slot.start, slot.stop, tuple(h for h in slot.holders if h in near or h == hub))
