"""Who runs which microbatch when: the visits of every peer's list, by simulation in unit times.

A forward and a backward take one unit, a transfer none, and at every instant each peer starts the
best action that is ready. So any plan, with any holders and routes, gets lists that one execution
has followed to the end: no deadlock is left.

- Every holder of a stage takes its microbatches in ascending order, forward and backward, so that
  gradients add up in microbatch order under any schedule. The lowest unfinished microbatch is
  therefore never behind another one, and as no bound holds it back, the simulation always goes on.
- GPipe: all forwards of a peer, then all its backwards.
- 1F1B: backward before forward, and a bound on the microbatches that are live in (stage, holder):
  K - index for K stages, as in the textbook; more, the number of holders from this stage on over
  those of this stage, where later stages have more holders and would starve otherwise.
- Interleaved (peers with several stages; where every peer has one, it is 1F1B): microbatches go
  through a peer in rounds, depth first as in Megatron-LM (Narayanan et al. 2021, section 2.2): a
  round goes through one of the peer's stages and then the next, backwards from the last one to the
  first. A round is as long as the way from a stage of the peer to its next: K for K peers in a
  circle. Backward goes before forward, and the bound is on what is live on a peer, all its stages
  together: the units that the first microbatch needs to come back to the peer as a gradient, when
  nothing is bound. For stage i on peer i mod K, v stages each, that is 2(K - r - 1) + (v - 1)K + 1
  for peer r, and M microbatches (a multiple of K) leave a bubble of (K - 1) / (vM + K - 1). In
  other plans the lowest unfinished microbatch may exceed it by the number of the peer's stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.action import Action, Kind
from ..plan.cut import Stage
from ..plan.plan import PeerId, Plan, Route, by_stage
from ..plan.swaps import Crossing, crossings, swaps

__all__ = ["visit_lists"]

Lists = dict[PeerId, list[Action]]


def visit_lists(
    plan: Plan, stages: Sequence[Stage], routes: Sequence[Route], *, training: bool
) -> Lists:
    """Forwards and backwards of every peer of the plan over `routes`; without `training`
    evaluations in their place."""
    simulation = _Simulation(plan, stages, routes, training=training)
    if simulation.interleaved:
        free = _Simulation(plan, stages, routes, training=training)
        free.run(probing=True)
        simulation.bind(free.round_trip)
    return simulation.run()


class _Needs:
    """By stage, the stages of whose visits a visit there needs: for its forward the `forward` of
    those, for its backward the `backward` of those and the forward of the `late` ones."""

    def __init__(self, stages: int, crossings: Sequence[Crossing]) -> None:
        forward: list[set[int]] = [set() for _ in range(stages)]
        backward: list[set[int]] = [set() for _ in range(stages)]
        late: list[set[int]] = [set() for _ in range(stages)]
        for crossing in crossings:
            (late if crossing.late else forward)[crossing.target].add(crossing.source)
            if crossing.grad:
                backward[crossing.source].add(crossing.target)
        self.forward, self.backward, self.late = forward, backward, late
        self.wakes: list[set[int]] = [set() for _ in range(stages)]
        """Those in which its visits may make another one ready."""
        for needed in (forward, backward, late):
            for i, of in enumerate(needed):
                for j in of:
                    self.wakes[j].add(i)


class _Simulation:
    """List scheduling of forwards and backwards in unit times; see the module's docstring."""

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], routes: Sequence[Route], *, training: bool
    ) -> None:
        self.peers = plan.peers
        self.peer_of = [by_stage(route) for route in routes]
        """By microbatch and stage."""
        self.gpipe = plan.schedule == "gpipe" and training
        self.forward = Kind.FORWARD if training else Kind.EVALUATE
        self.has_backward = [training and s.has_backward for s in stages]
        orders: dict[tuple[int, ...], _Needs] = {}
        self.needs: list[_Needs] = []
        """By microbatch, what its visits wait for; one for all on routes of one order."""
        for route in routes:
            order = tuple(v.stage for v in route)
            if order not in orders:
                orders[order] = _Needs(len(stages), crossings(stages, route))
            self.needs.append(orders[order])
        # A microbatch stops being live in a stage with this action; where nothing is differentiated
        # it still fills the next stage's receive slots, until the first backward above it.
        last = len(stages) - 1
        self.ends: dict[tuple[Kind, int], list[int]] = {}
        above = -1  # the lowest stage with a backward from the present one on
        for i in range(last, -1, -1):
            above = i if self.has_backward[i] else above
            end = (Kind.BACKWARD, above) if above >= 0 else (self.forward, last)
            self.ends.setdefault(end, []).append(i)
        self.forwards: dict[tuple[PeerId, int], list[int]] = {}
        self.unfinished = [0] * len(routes)
        """Actions left of each microbatch."""
        for m, route in enumerate(routes):
            self.unfinished[m] = len(route) + sum(self.has_backward)
            for visit in route:
                self.forwards.setdefault((visit.peer, visit.stage), []).append(m)
        self.lowest = 0
        """The lowest unfinished microbatch."""
        self.holding: dict[PeerId, list[int]] = {peer: [] for peer in self.peers}
        for peer, stage in sorted(self.forwards, key=lambda key: key[1]):
            self.holding[peer].append(stage)
        self.limit = _limits(self.peer_of, last + 1)
        for a, b in swaps(plan):  # each is the first of the two for some microbatches
            self.limit[b] = self.limit[a]
        """By stage, the most live microbatches of one holder."""
        self.next_forward = dict.fromkeys(self.forwards, 0)
        self.next_backward = {key: 0 for key in self.forwards if self.has_backward[key[1]]}
        self.live = dict.fromkeys(self.forwards, 0)
        self.done: set[tuple[Kind, int, int]] = set()
        self.interleaved = (
            training
            and plan.schedule == "interleaved"
            and any(len(held) > 1 for held in self.holding.values())
        )
        self.room: dict[PeerId, int] = {}
        """The most live visits of a peer under "interleaved"; unbound where it is missing."""
        self.rounds = self._rounds(routes) if self.interleaved else {}
        self.now = 0
        self.turned = dict.fromkeys(self.peers, False)
        """Whether a peer's last action was a backward."""
        self.began: dict[PeerId, int] = {}
        self.round_trip: dict[PeerId, int] = {}
        """Units from a peer's first forward until the first microbatch stops being live there."""

    def _rounds(self, routes: Sequence[Route]) -> dict[PeerId, dict[int, int]]:
        """By peer and microbatch, the round in which the peer has it."""
        visited: dict[PeerId, dict[int, int]] = {peer: {} for peer in self.peers}
        length = dict.fromkeys(self.peers, 1)
        for m, route in enumerate(routes):
            before: dict[PeerId, int] = {}
            for visit in route:
                gap = visit.stage - before.get(visit.peer, visit.stage)
                length[visit.peer] = max(length[visit.peer], gap)
                before[visit.peer] = visit.stage
                visited[visit.peer].setdefault(m, len(visited[visit.peer]))
        return {
            peer: {m: place // length[peer] for m, place in found.items()}
            for peer, found in visited.items()
        }

    def bind(self, round_trip: dict[PeerId, int]) -> None:
        """Bounds what is live on each peer; never below what its wider stages need."""
        for peer, held in self.holding.items():
            if peer in round_trip:
                wide = max(self.limit[i] for i in held)
                self.room[peer] = max(round_trip[peer], wide)

    def run(self, *, probing: bool = False) -> Lists:
        """The list of every peer. Probing ends when every round trip is known."""
        lists: Lists = {peer: [] for peer in self.peers}
        total = sum(self.unfinished)
        visiting = sum(1 for held in self.holding.values() if held)
        awake = dict.fromkeys(self.peers)
        while len(self.done) < total and not (probing and len(self.round_trip) == visiting):
            # Everyone chooses from what was finished before this instant, then all finish. A peer
            # for which nothing was ready is not asked again before that can have changed.
            chosen = [(peer, self._choose(peer)) for peer in awake]
            started = [(peer, action) for peer, action in chosen if action is not None]
            assert started, f"no peer can go on after {len(self.done)} of {total} actions"
            awake = dict.fromkeys(peer for peer, _ in started)
            for peer, action in started:
                awake |= dict.fromkeys(self._finish(peer, action))
                lists[peer].append(action)
            while self.lowest < len(self.unfinished) and not self.unfinished[self.lowest]:
                self.lowest += 1
                if self.interleaved and self.lowest < len(self.peer_of):
                    awake |= dict.fromkeys(self.peer_of[self.lowest])
            self.now += 1
        return lists

    def _finish(self, peer: PeerId, action: Action) -> list[PeerId]:
        """Returns the peers for which something may have become ready."""
        m, stage = action.microbatch, action.stage
        self.turned[peer] = action.kind is Kind.BACKWARD
        if action.kind is Kind.BACKWARD:
            self.next_backward[peer, stage] += 1
        else:
            self.next_forward[peer, stage] += 1
            self.live[peer, stage] += 1
            self.began.setdefault(peer, self.now)
        self.done.add((action.kind, m, stage))
        self.unfinished[m] -= 1
        peer_of = self.peer_of[m]
        woken = [peer_of[i] for i in self.needs[m].wakes[stage]]
        for i in self.ends.get((action.kind, stage), ()):
            other = peer_of[i]
            self.live[other, i] -= 1
            self.round_trip.setdefault(other, self.now - self.began.get(other, self.now))
            woken.append(other)
        return woken

    def _choose(self, peer: PeerId) -> Action | None:
        """The best ready action of a peer. 1F1B and GPipe: the lowest microbatch first, then the
        stage nearest to where that microbatch is going. Interleaved: round, stage, microbatch."""
        holding = self.holding[peer]
        backwards = [a for i in holding if (a := self._ready_backward(peer, i))]
        if self.gpipe and any(
            self.next_forward[peer, i] < len(self.forwards[peer, i]) for i in holding
        ):
            backwards = []
        if self.interleaved:
            rounds = self.rounds[peer]
            forwards = [a for i in holding if (a := self._ready_forward(peer, i))]
            live = sum(self.live[peer, i] for i in holding)
            if live >= self.room.get(peer, live + 1):
                forwards = [a for a in forwards if a.microbatch == self.lowest]
            if backwards and not (forwards and self.turned[peer]):
                return min(backwards, key=lambda a: (rounds[a.microbatch], -a.stage))
            return min(forwards, key=lambda a: (rounds[a.microbatch], a.stage), default=None)
        ready = backwards or [a for i in holding if (a := self._ready_forward(peer, i))]
        return min(ready, key=lambda a: (a.microbatch, -a.stage), default=None)

    def _ready_forward(self, peer: PeerId, stage: int) -> Action | None:
        queue, at = self.forwards[peer, stage], self.next_forward[peer, stage]
        if at == len(queue):
            return None
        m = queue[at]
        if any((self.forward, m, i) not in self.done for i in self.needs[m].forward[stage]):
            return None
        bound = not (self.gpipe or self.interleaved)
        if bound and self.live[peer, stage] >= self.limit[stage]:
            return None
        return Action(self.forward, m, stage)

    def _ready_backward(self, peer: PeerId, stage: int) -> Action | None:
        if (peer, stage) not in self.next_backward:
            return None
        queue, at = self.forwards[peer, stage], self.next_backward[peer, stage]
        if at == len(queue):
            return None
        m = queue[at]
        ready = (
            (self.forward, m, stage) in self.done
            and all((Kind.BACKWARD, m, i) in self.done for i in self.needs[m].backward[stage])
            and all((self.forward, m, i) in self.done for i in self.needs[m].late[stage])
        )
        return Action(Kind.BACKWARD, m, stage) if ready else None


def _limits(peer_of: Sequence[Sequence[PeerId]], stages: int) -> list[int]:
    """The bound of 1F1B on the live microbatches of each holder, by stage."""
    if not peer_of:
        return [0] * stages
    width = [len({peers[i] for peers in peer_of}) for i in range(stages)]
    limits, from_here = [], 0
    for i in range(stages - 1, -1, -1):
        from_here += width[i]
        limits.append(max(stages - i, -(-from_here // width[i])))
    return limits[::-1]
