"""Lists of visits: whether they are those of a plan's routes, and their short form for the wire.

Holders of one stage mostly have the same list but for the numbers of their microbatches. So a list
is written by places (the k-th of the peer's microbatches, ascending, at the j-th of its stages),
and equal lists are written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .action import TRAITS, VISITS, Action, Kind
from .plan import PeerId, Plan, PlanError, Route, Visits

__all__ = ["NumberedVisits", "check_visits", "halved", "halved_of", "visits_by_peer"]

_NUMBERS = {kind: TRAITS[kind].number for kind in VISITS}
_KINDS = {number: kind for kind, number in _NUMBERS.items()}
"""By number on the wire."""
_RADIX = 8
"""Numbers that are kept for kinds."""


def halved(visits: Iterable[Action]) -> frozenset[int]:
    """The stages of which a peer's list has the weights' gradients apart: there a backward leaves
    them out."""
    return frozenset(a.stage for a in visits if a.kind is Kind.WEIGHT)


def halved_of(plan: Plan) -> frozenset[tuple[PeerId, int]]:
    """Return the peers and stages of a plan whose lists have them apart."""
    lists = zip(plan.peers, plan.visits, strict=True) if plan.visits else ()
    return frozenset((peer, k) for peer, visits in lists for k in halved(visits))


def visits_by_peer(routes: Sequence[Route]) -> dict[PeerId, dict[int, list[int]]]:
    """By peer, its microbatches in ascending order, and the stages of each in the route's order."""
    found: dict[PeerId, dict[int, list[int]]] = {}
    for m, route in enumerate(routes):
        for visit in route:
            found.setdefault(visit.peer, {}).setdefault(m, []).append(visit.stage)
    return found


def check_visits(
    peer: PeerId, visits: Iterable[Action], wanted: Mapping[int, Iterable[int]], forward: Kind
) -> None:
    """Raises PlanError when the list of a peer has a visit twice, a backward without its forward
    before it, weights' gradients without their backward before them or for some backwards of a
    stage only, or other forwards than `wanted`: by microbatch, the stages by its route."""
    listed = tuple(visits)
    mine = {Action(forward, m, stage) for m, stages in wanted.items() for stage in stages}
    if {action for action in listed if action.kind is forward} != mine:
        raise PlanError(f"the list of {peer} has other visits than its routes")
    seen: set[Action] = set()
    for action in listed:
        before = action._replace(kind=TRAITS[action.kind].behind or action.kind)
        if action in seen or (action.kind is not forward and before not in seen):
            raise PlanError(f"{action} stands where it cannot in the list of {peer}")
        seen.add(action)
    apart = halved(listed)
    for action in listed:
        weight = action._replace(kind=Kind.WEIGHT)
        if action.kind is Kind.BACKWARD and action.stage in apart and weight not in seen:
            raise PlanError(
                f"the list of {peer} has {action} without {weight}: expected the weights' "
                f"gradients of all microbatches of stage {action.stage} apart, or of none"
            )


@dataclass(frozen=True)
class NumberedVisits:
    """The lists of a plan as numbers, each different list once."""

    lists: tuple[tuple[int, ...], ...]
    list_of: tuple[int, ...]
    """By peer of the plan, which of `lists` is its own."""

    @classmethod
    def of(cls, peers: Sequence[PeerId], visits: Visits, routes: Sequence[Route]) -> NumberedVisits:
        places = visits_by_peer(routes)
        lists: dict[tuple[int, ...], int] = {}
        list_of = []
        for peer, actions in zip(peers, visits, strict=True) if visits else ():
            microbatches, stages = _places(places.get(peer, {}))
            row = {m: k for k, m in enumerate(microbatches)}
            column = {stage: j for j, stage in enumerate(stages)}
            numbers = tuple(
                (row[a.microbatch] * len(stages) + column[a.stage]) * _RADIX + _NUMBERS[a.kind]
                for a in actions
            )
            list_of.append(lists.setdefault(numbers, len(lists)))
        return cls(tuple(lists), tuple(list_of))

    def visits(self, peers: Sequence[PeerId], routes: Sequence[Route]) -> Visits:
        """The lists of these peers. Raises PlanError for one that is not there, and for a number
        that is no visit by the peer's routes."""
        if not self.list_of:
            return ()
        if len(self.list_of) != len(peers):
            raise PlanError(f"visits of {len(self.list_of)} peers are listed, not of {len(peers)}")
        places = visits_by_peer(routes)
        return tuple(
            self._of(peer, which, places.get(peer, {}))
            for peer, which in zip(peers, self.list_of, strict=True)
        )

    def _of(self, peer: PeerId, which: int, mine: Mapping[int, list[int]]) -> tuple[Action, ...]:
        if which >= len(self.lists):
            raise PlanError(f"{peer} has list {which} of {len(self.lists)}")
        microbatches, stages = _places(mine)
        most = len(microbatches) * len(stages) * _RADIX
        found = []
        for number in self.lists[which]:
            place, kind = divmod(number, _RADIX)
            if number >= most or kind not in _KINDS:
                raise PlanError(f"{number} is no visit of {peer}, which has fewer than {most}")
            k, j = divmod(place, len(stages))
            found.append(Action(_KINDS[kind], microbatches[k], stages[j]))
        return tuple(found)


def _places(mine: Mapping[int, list[int]]) -> tuple[list[int], list[int]]:
    return list(mine), sorted({stage for stages in mine.values() for stage in stages})
