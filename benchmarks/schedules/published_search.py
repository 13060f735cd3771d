"""SkipPipe's search for paths, made anew from its description (arXiv 2502.19913): what ours is held
against on places for which nobody has published a schedule.

Conflict-based search. An agent is one lane, which takes its path in every wave. Each agent takes
the quickest path that is not forbidden to it; conflicts make children, in which the path of one or
several agents is forbidden or put off: stages with too many visits, then nodes, then two
microbatches on a node at a time.

Theirs finds an agent's path by A* and looks for those of all agents again in every child. Here all
permitted paths are listed once, by their seconds, and only agents with new constraints look again.
So more children fit into the same time. Of everything that is simulated, the best counts, also when
the search is stopped.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shoal.benchmarks.schedules.published_rules import replay, waves
from shoal.benchmarks.schedules.route_checks import stage_sets
from shoal.planner.routes.route_rules import LanePath, RouteRules, orders_of

__all__ = ["Found", "blind_paths", "conflict_search"]

VIABLE = 32
"""Sets of stages with which the second half of the search begins."""
ENOUGH = 8
"""Solutions without conflicts."""
BELOW, ABOVE_S = 0.88, 5.0
"""It ends at a solution so far below the first one, and leaves out children so far above the best
one."""
MOST_WAITING = 40_000
"""Children that wait; of more, the better half is kept."""
BUNDLE_S = 1.0
"""Seconds between microbatches of one bundle."""


@dataclass(frozen=True)
class Found:
    """Seconds of a step by their simulation, and the path of each lane."""

    step_s: float
    paths: tuple[LanePath, ...]
    children: int
    """How many were looked at."""
    finished: bool
    """Whether it ended by itself."""


Interval = tuple[int, float, float]
Visit = tuple[int, float, float, bool]
"""Node, begin, end, whether forward."""


@dataclass(frozen=True)
class _Sets:
    """A node of the search: what each agent must not do, and what it does."""

    stages: tuple[frozenset[int], ...]
    nodes: tuple[frozenset[int], ...]
    """Forbidden, by agent."""
    delays: tuple[tuple[Interval, ...], ...]
    paths: tuple[LanePath, ...] = ()
    ends: tuple[float, ...] = ()
    visits: tuple[tuple[Visit, ...], ...] = ()


@dataclass
class _Search:
    rules: RouteRules
    delay: Sequence[Sequence[float]]
    forward_s: float
    stage_nodes: Sequence[Sequence[int]]
    bundle: int = 1
    """Microbatches that go together."""
    listed: dict[int, list[tuple[float, LanePath]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        each = self.rules.memory // self.bundle
        first = self.stage_nodes[0]
        self.starts = [node for node in first for _ in range(each)]
        self.ready = [k * self.forward_s for _ in first for k in range(each)]
        self.cap = self.rules.visits_per_stage(len(first) * self.rules.memory) // self.bundle
        self.memory = each
        for node in first:
            paths = [
                p
                for stages in stage_sets(self.rules)
                for order in orders_of(self.rules, stages)
                for p in self._paths(node, order)
            ]
            self.listed[node] = sorted((self._visits(p, 0.0, ())[1], p) for p in paths)

    def _paths(self, start: int, order: Sequence[int]) -> Iterator[LanePath]:
        for nodes in itertools.product(*(self.stage_nodes[s] for s in order[1:])):
            yield tuple(zip(order, (start, *nodes), strict=True))

    def _visits(
        self, path: LanePath, ready: float, delays: Sequence[Interval]
    ) -> tuple[tuple[Visit, ...], float]:
        """Everything that an agent does, and its end, when it is put off by `delays`."""
        nodes = [n for _, n in path]
        way = [*nodes, nodes[0], *reversed(nodes)]
        length, now, found = len(nodes), ready, []
        for step, node in enumerate(way):
            if step:
                now += self.delay[way[step - 1]][node]
            took = self.forward_s * (1.0 if step < length else 0.25 if step == length else 1.5)
            again = bool(delays)
            while again:
                again = False
                for k, begin, end in delays:
                    if k == node and now < end and begin < now + took:
                        now, again = end, True
            found.append((node, now, now + took, step < length))
            now += took
        return tuple(found), now

    def quickest(self, sets: _Sets, agent: int) -> tuple[float, LanePath] | None:
        """The quickest permitted path of an agent, and its end."""
        ready, delays = self.ready[agent], sets.delays[agent]
        no_stage, no_node = sets.stages[agent], sets.nodes[agent]
        best: tuple[float, LanePath] | None = None
        for seconds, path in self.listed[self.starts[agent]]:
            if best is not None and seconds + ready >= best[0]:
                break
            if any(s in no_stage or n in no_node for s, n in path[1:]):
                continue
            end = self._visits(path, ready, delays)[1] if delays else seconds + ready
            if best is None or end < best[0]:
                best = end, path
        return best

    def solved(self, sets: _Sets, agents: Sequence[int]) -> _Sets | None:
        """The sets with the paths of these agents found again; None: one has none."""
        n = len(self.starts)
        paths, ends, visits = (
            list(sets.paths) or [()] * n,
            list(sets.ends) or [0.0] * n,
            list(sets.visits) or [()] * n,
        )
        for a in agents:
            found = self.quickest(sets, a)
            if found is None:
                return None
            ends[a], paths[a] = found
            visits[a] = self._visits(paths[a], self.ready[a], sets.delays[a])[0]
        return replace(sets, paths=tuple(paths), ends=tuple(ends), visits=tuple(visits))

    def forbidden(self, sets: _Sets, agents: Sequence[int], what: int, stage: bool) -> _Sets | None:
        which = list(sets.stages if stage else sets.nodes)
        for a in agents:
            which[a] |= {what}
        changed = replace(sets, stages=tuple(which)) if stage else replace(sets, nodes=tuple(which))
        return self.solved(changed, agents)

    def children(self, sets: _Sets, *, by_stage: bool, most: int) -> list[_Sets] | None:
        """One child for each of the first ways in which the surplus visitors of a stage or node,
        the quickest first, are kept from it; None: nothing has too many."""
        place = 0 if by_stage else 1
        limit = self.cap if by_stage else self.memory
        visitors: dict[int, list[int]] = {}
        for a, path in enumerate(sets.paths):
            for visit in path[1:]:
                visitors.setdefault(visit[place], []).append(a)
        for what, agents in sorted(visitors.items()):
            if len(agents) <= limit:
                continue
            free = [a for a in agents if self._may_lose(sets, a, what, by_stage)]
            free.sort(key=lambda a: sets.ends[a])
            ways = itertools.combinations(free, len(agents) - limit)
            made = (self.forbidden(sets, w, what, by_stage) for w in itertools.islice(ways, most))
            return [child for child in made if child is not None]
        return None

    def _may_lose(self, sets: _Sets, agent: int, what: int, by_stage: bool) -> bool:
        if by_stage:
            return self.rules.stages - len(sets.stages[agent]) > self.rules.length
        stage = next(s for s, nodes in enumerate(self.stage_nodes) if what in nodes)
        return any(n != what and n not in sets.nodes[agent] for n in self.stage_nodes[stage])

    def overlap(self, sets: _Sets) -> list[_Sets] | None:
        """Children that put off one of the first two microbatches, slowest pairs first, that are on
        a node at once; None: none are."""
        by_speed = sorted(range(len(sets.ends)), key=lambda a: -sets.ends[a])
        for i, j in itertools.combinations(range(len(by_speed)), 2):
            a, b = by_speed[i], by_speed[j]
            for (node, begin, end, forward), (k, other, stop, other_forward) in itertools.product(
                sets.visits[a], sets.visits[b]
            ):
                if node != k or begin >= stop or other >= end or not (forward or other_forward):
                    continue
                late, early = (b, (node, begin, end)), (a, (node, other, stop))
                if not forward or not other_forward:
                    chosen = [late if begin < other else early]
                else:
                    chosen = [late, *([early] if i > len(by_speed) / 4 else [])]
                made = []
                for agent, interval in chosen:
                    delays = list(sets.delays)
                    delays[agent] = (*delays[agent], interval)
                    made.append(self.solved(replace(sets, delays=tuple(delays)), [agent]))
                return [child for child in made if child is not None]
        return None

    def simulated_s(self, paths: Sequence[LanePath]) -> float:
        lanes = [
            (tuple(n for _, n in path), self.ready[a] + k * BUNDLE_S)
            for a, path in enumerate(paths)
            for k in range(self.bundle)
        ]
        try:
            return max(replay(waves(lanes, 2), self.delay, self.forward_s, self.rules.memory))
        except ValueError:
            return float("inf")

    def unbundled(self, paths: Sequence[LanePath]) -> tuple[LanePath, ...]:
        return tuple(path for path in paths for _ in range(self.bundle))

    def frozen(self, sets: _Sets) -> _Sets:
        """The same with the stages that each agent visits now as the only ones that it may."""
        others = [set(range(1, self.rules.stages)) - {s for s, _ in p} for p in sets.paths]
        return replace(sets, stages=tuple(frozenset(x) for x in others))


def conflict_search(
    rules: RouteRules,
    delay: Sequence[Sequence[float]],
    forward_s: float,
    stage_nodes: Sequence[Sequence[int]],
    ended: Callable[[], bool],
    *,
    bundle: int = 1,
) -> Found | None:
    """Their paths for two waves, when `ended` says stop or the search ends by itself; None: nothing
    that keeps the rules was found until then. `bundle`: microbatches with one path, as in their
    coarse mode."""
    search = _Search(rules, delay, forward_s, stage_nodes, bundle=bundle)
    viable, looked = _viable(search, ended)
    best: Found | None = None
    heap, ticket = [(max(s.ends), i, s) for i, s in enumerate(viable)], itertools.count(VIABLE)
    heapq.heapify(heap)
    solutions: list[float] = []
    while heap and not ended() and len(solutions) < ENOUGH:
        if solutions and min(solutions) < BELOW * solutions[0]:
            break
        if len(heap) > MOST_WAITING:
            heap = heapq.nsmallest(MOST_WAITING // 2, heap)
        _, _, sets = heapq.heappop(heap)
        looked += 1
        made = search.children(sets, by_stage=False, most=2)
        if made is not None:
            for child in made:
                heapq.heappush(heap, (max(child.ends), next(ticket), child))
            continue
        seconds = search.simulated_s(sets.paths)
        if best is None or seconds < best.step_s:
            best = Found(seconds, search.unbundled(sets.paths), 0, False)
        made = search.overlap(sets)
        if made is None:
            solutions.append(seconds)
            continue
        for child in made:
            score = search.simulated_s(child.paths)
            if score < best.step_s:
                best = Found(score, search.unbundled(child.paths), 0, False)
            if score <= best.step_s + ABOVE_S:
                heapq.heappush(heap, (score, next(ticket), child))
    return best and replace(best, children=looked, finished=not ended())


def _viable(search: _Search, ended: Callable[[], bool]) -> tuple[list[_Sets], int]:
    """Up to `VIABLE` sets in which no stage has too many visits, and how many were looked at."""
    n = len(search.starts)
    empty = _Sets((frozenset(),) * n, (frozenset(),) * n, ((),) * n)
    root = search.solved(empty, range(n))
    assert root is not None
    heap, ticket, looked = [(max(root.ends), 0, root)], itertools.count(1), 0
    found: dict[tuple[frozenset[int], ...], _Sets] = {}
    seen: set[tuple[frozenset[int], ...]] = set()
    while heap and len(found) < max(1, VIABLE // search.bundle) and not ended():
        _, _, sets = heapq.heappop(heap)
        looked += 1
        made = search.children(sets, by_stage=True, most=3)
        if made is None:
            frozen = search.frozen(sets)
            found.setdefault(frozen.stages, frozen)
        for child in made or ():
            if child.stages not in seen:
                seen.add(child.stages)
                heapq.heappush(heap, (max(child.ends), next(ticket), child))
    return list(found.values()), looked


def blind_paths(
    rules: RouteRules, stage_nodes: Sequence[Sequence[int]], seed: int
) -> tuple[LanePath, ...]:
    """Skip-only paths that do not look at the network: of paths that are all equally long, drawn by
    chance, what keeps the number of visits of each stage and node."""
    rng = random.Random(seed)
    lanes = [node for node in stage_nodes[0] for _ in range(rules.memory)]
    cap = rules.visits_per_stage(len(lanes))
    orders = [o for s in stage_sets(rules) for o in orders_of(replace(rules, swaps=0), s)]
    while True:
        room = {s: cap for s in range(1, rules.stages)}
        places = [[n for n in nodes for _ in range(rules.memory)] for nodes in stage_nodes]
        for nodes in places:
            rng.shuffle(nodes)
        found: list[LanePath] = []
        for start in lanes:
            fits = [o for o in orders if all(room[s] for s in o[1:])]
            if not fits:
                break
            # Those with more room more often, else most draws come to no end.
            drawn = rng.sample(fits, min(4, len(fits)))
            order = max(drawn, key=lambda o: sum(room[s] for s in o[1:]))
            for s in order[1:]:
                room[s] -= 1
            found.append(((0, start), *((s, places[s].pop()) for s in order[1:])))
        if len(found) == len(lanes):
            return tuple(found)
