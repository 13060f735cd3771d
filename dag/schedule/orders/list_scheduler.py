"""List scheduling of the visits of a step: each peer that is idle starts the best action that is
ready, as a schedule chooses.

So any plan, with any holders and routes, gets lists that one execution has followed to the end: no
deadlock is left. Every holder of a stage takes its microbatches in ascending order, forward and
backward, so that gradients add up in microbatch order under any schedule. The lowest unfinished
microbatch is therefore never behind another one, and as a schedule never holds it back, the
calculation always goes on.

Without `Times` a forward and a backward take one unit each, and a message none.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ...plan.action import TRAITS, Action, Kind
from ...plan.cut import Stage
from ...plan.plan import PeerId, Plan, PlanError
from ...plan.routes import Crossing, crossings

__all__ = ["Bounds", "ListScheduler", "Lists", "Times"]


class Lists(dict[PeerId, list[Action]]):
    """By peer, its visits in order."""

    ended_s = 0.0
    """When the last one ends, if there are times."""


Bounds = Mapping[int, int]
"""By stage, the most live microbatches of one holder: forward begun, and not yet at the action with
which the stage may let go of the microbatch."""


class Times(Protocol):
    """Seconds of visits and messages."""

    def visit(self, peer: PeerId, action: Action) -> float:
        """Seconds that a peer computes for a visit."""

    def message(self, source: Visited, target: Visited) -> tuple[float, float]:
        """Seconds for which a message from one visit to another holds its link, and the link's
        latency."""


Visited = tuple[PeerId, Kind, int]
"""Peer, kind of the visit, stage."""


class _Needs:
    """Per stage, what waits for a visit there: the forwards that wait for its forward, the
    backwards that do (`late`), and the backwards that wait for its backward; and how many visits a
    forward and a backward wait for, the stage's own forward included."""

    def __init__(self, stages: int, crossings: Sequence[Crossing]) -> None:
        self.forward: list[dict[int, None]] = [{} for _ in range(stages)]
        self.late: list[dict[int, None]] = [{} for _ in range(stages)]
        self.backward: list[dict[int, None]] = [{} for _ in range(stages)]
        for c in crossings:
            (self.late if c.late else self.forward)[c.source][c.target] = None
            if c.grad:
                self.backward[c.target][c.source] = None
        self.of_forward, self.of_backward = [0] * stages, [1] * stages
        for waiting, count in (
            (self.forward, self.of_forward),
            (self.late, self.of_backward),
            (self.backward, self.of_backward),
        ):
            for targets in waiting:
                for i in targets:
                    count[i] += 1


class ListScheduler:
    """The visits of a training step over `plan.routes`, or without `training` of an evaluation over
    `plan.evaluation_routes`. A schedule asks for what is ready, and chooses."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        times: Times | None = None,
        *,
        training: bool = True,
        halved: Collection[tuple[PeerId, int]] = (),
    ) -> None:
        """`halved`: peers and stages where the weights' gradients of a backward are apart."""
        routes = plan.routes if training else plan.evaluation_routes
        self.routes, self.peers, self._times = routes, plan.peers, times
        self.peer_of = [{v.stage: v.peer for v in route} for route in routes]
        """By microbatch and stage that it visits."""
        self.forward = Kind.FORWARD if training else Kind.EVALUATE
        has_backward = [training and s.has_backward for s in stages]
        orders = [tuple(v.stage for v in route) for route in routes]
        routes_of = dict(zip(orders, routes, strict=True))
        needs = {o: _Needs(len(stages), crossings(stages, r)) for o, r in routes_of.items()}
        ends = {o: _ends(self.forward, {k: has_backward[k] for k in sorted(o)}) for o in needs}
        self._needs, self._ends = [needs[o] for o in orders], [ends[o] for o in orders]
        self._forward_waits = [list(n.of_forward) for n in self._needs]
        self._backward_waits = [list(n.of_backward) for n in self._needs]
        """By microbatch and stage, how much a visit still waits for."""
        self.queue: dict[tuple[PeerId, int], list[int]] = {}
        """By peer and stage, the microbatches that it takes there, ascending."""
        self._unfinished = [
            len(route) + sum(has_backward[v.stage] for v in route) for route in routes
        ]
        """By microbatch, forwards and backwards that are left."""
        for m, route in enumerate(routes):
            for visit in route:
                self.queue.setdefault((visit.peer, visit.stage), []).append(m)
        self._next_weight = {key: 0 for key in self.queue if key in halved}
        self.left = sum(self._unfinished)
        self.lowest = 0
        """The lowest unfinished microbatch."""
        self.holding: dict[PeerId, list[int]] = {peer: [] for peer in self.peers}
        """By peer, the stages that it visits, ascending."""
        for peer, stage in sorted(self.queue, key=lambda key: key[1]):
            self.holding[peer].append(stage)
        self._next_forward = dict.fromkeys(self.queue, 0)
        self._next_backward = {key: 0 for key in self.queue if has_backward[key[1]]}
        self.live = dict.fromkeys(self.queue, 0)
        self.last: dict[PeerId, Kind] = {}
        """By peer, the kind of its last visit."""
        self._heap: list[tuple[float, int, PeerId, Action, bool]] = []
        self._pushed = 0
        self._free: dict[tuple[PeerId, PeerId], float] = {}
        """By link, when its last message has left."""
        self._started: dict[PeerId, float] = {}
        self.ended = 0.0
        """When the last visit ended that is done."""
        self._began: dict[PeerId, float] = {}
        self.round_trip: dict[PeerId, float] = {}
        """By peer, from its first forward until its first microbatch stops being live there."""

    # ------------------------------------------------------------ what is ready

    def forwards_left(self, peer: PeerId) -> bool:
        """Whether the peer has a forward that it has not done."""
        return any(
            self._next_forward[peer, i] < len(self.queue[peer, i]) for i in self.holding[peer]
        )

    def ready_forwards(self, peer: PeerId) -> list[Action]:
        """Per stage of the peer, the forward that may begin."""
        found = []
        for i in self.holding[peer]:
            queue, at = self.queue[peer, i], self._next_forward[peer, i]
            if at < len(queue) and not self._forward_waits[queue[at]][i]:
                found.append(Action(self.forward, queue[at], i))
        return found

    def ready_backwards(self, peer: PeerId) -> list[Action]:
        """Per stage of the peer, the backward that may begin."""
        found = []
        for i in self.holding[peer]:
            at = self._next_backward.get((peer, i))
            queue = self.queue[peer, i]
            if at is not None and at < len(queue) and not self._backward_waits[queue[at]][i]:
                found.append(Action(Kind.BACKWARD, queue[at], i))
        return found

    def waiting(self, peer: PeerId, stage: int) -> int:
        """How many backwards of a stage the peer has done without the weights' gradients."""
        done = self._next_weight.get((peer, stage))
        return 0 if done is None else self._next_backward[peer, stage] - done

    def ready_weights(self, peer: PeerId) -> list[Action]:
        """Per stage of the peer, the weights' gradients that may be computed next."""
        return [
            Action(Kind.WEIGHT, self.queue[peer, i][self._next_weight[peer, i]], i)
            for i in self.holding[peer]
            if self.waiting(peer, i)
        ]

    def is_ready(self, visit: Action) -> bool:
        """Whether a visit that its peer has not done, after all lower ones of its kind and stage,
        may begin."""
        if TRAITS[visit.kind].by_itself:
            return True
        waits = self._backward_waits if visit.kind is Kind.BACKWARD else self._forward_waits
        return not waits[visit.microbatch][visit.stage]

    # ------------------------------------------------------------ running

    def run(
        self, choose: Callable[[PeerId], Action | None], *, until_round_trips: bool = False
    ) -> Lists:
        """The list of every peer; `choose` returns an idle peer's best action. With
        `until_round_trips` the calculation ends once every peer's round trip is known. Raises
        PlanError when no peer can go on."""
        lists = Lists((peer, []) for peer in self.peers)
        visiting = sum(1 for held in self.holding.values() if held)
        busy, now = set[PeerId](), 0.0
        awake: dict[PeerId, None] = dict.fromkeys(self.peers)
        while not (until_round_trips and len(self.round_trip) == visiting):
            # All choose from what was finished before this instant. A peer for which nothing was
            # ready is not asked again before that can have changed.
            for peer in awake:
                if peer not in busy and (action := choose(peer)) is not None:
                    busy.add(peer)
                    lists[peer].append(action)
                    self._started[peer] = now
                    seconds = 1.0 if self._times is None else self._times.visit(peer, action)
                    self._push(now + seconds, peer, action, ended=True)
            if not self._heap and self.left:
                raise PlanError(f"{self.left} visits cannot be done: peers wait for each other")
            if not self._heap:
                break
            self.ended = lists.ended_s = now = self._heap[0][0]
            awake = {}
            while self._heap and self._heap[0][0] == now:
                *_, peer, action, ended = heapq.heappop(self._heap)
                if ended:
                    busy.discard(peer)
                    awake[peer] = None
                    self._finish(peer, action, now, awake)
                else:
                    self._arrive(action, awake)
            while self.lowest < len(self._unfinished) and not self._unfinished[self.lowest]:
                self.lowest += 1
                if self.lowest < len(self.peer_of):  # a schedule lets it pass a bound
                    awake |= dict.fromkeys(self.peer_of[self.lowest].values())
        return lists

    def _push(self, at: float, peer: PeerId, action: Action, *, ended: bool) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, peer, action, ended))

    def _finish(self, peer: PeerId, action: Action, now: float, awake: dict[PeerId, None]) -> None:
        kind, m, stage = action.kind, action.microbatch, action.stage
        self.last[peer] = kind
        if TRAITS[kind].by_itself:
            if kind is Kind.WEIGHT:
                self._next_weight[peer, stage] += 1
            return
        if kind is Kind.BACKWARD and (peer, stage) not in self._next_backward:
            raise PlanError(f"{action} is listed, and its stage has no backward")
        self.left -= 1
        self._unfinished[m] -= 1
        needs = self._needs[m]
        if kind is Kind.BACKWARD:
            self._next_backward[peer, stage] += 1
            for i in needs.backward[stage]:
                self._send(peer, action, Action(kind, m, i), now, awake)
        else:
            self._next_forward[peer, stage] += 1
            self.live[peer, stage] += 1
            self._began.setdefault(peer, self._started[peer])
            for i in needs.forward[stage]:
                self._send(peer, action, Action(kind, m, i), now, awake)
            for i in needs.late[stage]:
                self._send(peer, action, Action(Kind.BACKWARD, m, i), now, awake)
            self._backward_waits[m][stage] -= 1
        for i in self._ends[m].get((kind, stage), ()):
            other = self.peer_of[m][i]
            self.live[other, i] -= 1
            awake[other] = None
            began = self._began.get(other)
            if began is not None:
                self.round_trip.setdefault(other, self._started[peer] - began)

    def _send(
        self, peer: PeerId, action: Action, target: Action, now: float, awake: dict[PeerId, None]
    ) -> None:
        other = self.peer_of[target.microbatch][target.stage]
        if self._times is None or other == peer:
            self._arrive(target, awake)
            return
        hold, latency = self._times.message(
            (peer, action.kind, action.stage), (other, target.kind, target.stage)
        )
        left = self._free[peer, other] = max(now, self._free.get((peer, other), 0.0)) + hold
        self._push(left + latency, other, target, ended=False)

    def _arrive(self, target: Action, awake: dict[PeerId, None]) -> None:
        m, stage = target.microbatch, target.stage
        waits = self._backward_waits if target.kind is Kind.BACKWARD else self._forward_waits
        waits[m][stage] -= 1
        if not waits[m][stage]:
            awake[self.peer_of[m][stage]] = None


def _ends(forward: Kind, has_backward: Mapping[int, bool]) -> dict[tuple[Kind, int], list[int]]:
    """By kind and stage of a visit, the stages in which a microbatch stops being live with it:
    where nothing is differentiated it still fills the next stage's receive slots, until the first
    backward above it. `has_backward`: of the stages that it visits, ascending."""
    last, above = max(has_backward, default=0), -1  # the lowest with a backward from here on
    found: dict[tuple[Kind, int], list[int]] = {}
    for i in sorted(has_backward, reverse=True):
        above = i if has_backward[i] else above
        end = (Kind.BACKWARD, above) if above >= 0 else (forward, last)
        found.setdefault(end, []).append(i)
    return found
