"""The search for routes: nodes, stages, orders and waves at once, by annealing in two parts.

1. By a sum that a move changes in a few places: the round trips of each lane. Here nodes find
   their stages, and lanes their islands of fast links.
2. By the calculation of events (`route_timing.py`), which knows of waiting.

Every move keeps the number of visits of each node in each wave, so all rules hold all the time:

    exchange    two nodes change places, in the placement and on all paths
    hand over   two microbatches of a wave that visit one stage exchange its nodes
    trade       a microbatch gets a visit of another one, and gives it one in return
    reorder     a microbatch visits its stages in another permitted order
    cross       two microbatches of a wave exchange all that is behind their first nodes

One draw of random numbers after the other, so the result follows from seed and iterations.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .route_rules import LanePath, Order, RouteRules, orders_of
from .route_start import first_paths, placed
from .route_timing import RouteClock, RouteTimes

__all__ = ["RouteSearch", "Routes", "search_routes"]

GUIDE = 0.05
"""How much of the mean end is added to the step."""
POWER, ROOT = 8, 1 / 8
"""Lanes count by this power of their round trips, in the first part."""
HOT, COLD = 0.015, 0.0001
FINE_HOT, FINE_COLD = 0.01, 0.0003
"""Temperatures of the two parts, in what is minimised at their start."""


@dataclass(frozen=True, slots=True)
class Routes:
    """A placement of nodes and the paths of each wave by lane."""

    stage_of: tuple[int, ...]
    waves: tuple[tuple[LanePath, ...], ...]
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSearch:
    """How long to search, and what may change."""

    seed: int = 0
    rough: int = 480_000
    """Moves of the first part."""
    fine: int = 8_000
    """Moves of the second part."""
    starts: int = 8
    """Runs of the first part, of which the best one goes on."""
    alike: bool = False
    """Whether all waves take the same paths."""


class _State:
    def __init__(self, stage_of: Sequence[int], waves: Sequence[Sequence[LanePath]]) -> None:
        self.stage_of = list(stage_of)
        self.paths = [list(wave) for wave in waves]

    def frozen(self, step_s: float) -> Routes:
        return Routes(tuple(self.stage_of), tuple(map(tuple, self.paths)), step_s)


Change = list[tuple[int, int, LanePath]]
"""(wave, lane, its new path)."""


class _Moves:
    """Draws moves. A move is what it changes; None: this draw is none."""

    def __init__(self, rules: RouteRules, rng: random.Random, alike: bool) -> None:
        self.rules, self.rng, self.alike = rules, rng, alike

    def draw(self, state: _State) -> tuple[Change, tuple[int, int] | None] | None:
        kind = self.rng.random()
        if kind < 0.2:
            return self._exchange(state)
        wave = 0 if self.alike else self._below(len(state.paths))
        paths = state.paths[wave]
        a, b = self._below(len(paths)), self._below(len(paths))
        if kind < 0.4:
            found = self._hand_over(paths[a], paths[b])
        elif kind < 0.65:
            found = self._trade(paths[a], paths[b])
        elif kind < 0.85:
            found = self._reorder(paths[a])
        else:
            found = (paths[a][:1] + paths[b][1:], paths[b][:1] + paths[a][1:])
            if paths[a][0] == paths[b][0] and (self.alike or len(state.paths) == 1):
                return None
        if found is None or (a == b and len(found) == 2):
            return None
        lanes = (a, b)[: len(found)]
        every = range(len(state.paths)) if self.alike else (wave,)
        return [(w, k, p) for w in every for k, p in zip(lanes, found, strict=True)], None

    def _below(self, n: int) -> int:
        return int(self.rng.random() * n)

    def _exchange(self, state: _State) -> tuple[Change, tuple[int, int] | None] | None:
        n = len(state.stage_of)
        x, y = self._below(n), self._below(n)
        if x == y:
            return None
        s, t = state.stage_of[x], state.stage_of[y]
        one, two = (s, x), (t, y)
        to = {one: (s, y), two: (t, x)}
        changed = [
            (w, k, tuple([to.get(visit, visit) for visit in path]))
            for w, wave in enumerate(state.paths)
            for k, path in enumerate(wave)
            if one in path or two in path
        ]
        return changed, (x, y)

    def _hand_over(self, one: LanePath, two: LanePath) -> tuple[LanePath, ...] | None:
        at = {stage: j for j, (stage, _) in enumerate(two)}
        i = 1 + self._below(len(one) - 1)
        j = at.get(one[i][0], 0)
        if not j or one[i] == two[j]:
            return None
        return (*one[:i], two[j], *one[i + 1 :]), (*two[:j], one[i], *two[j + 1 :])

    def _trade(self, one: LanePath, two: LanePath) -> tuple[LanePath, ...] | None:
        i, j = 1 + self._below(len(one) - 1), 1 + self._below(len(two) - 1)
        s, t = one[i], two[j]
        if any(stage == t[0] for stage, _ in one) or any(stage == s[0] for stage, _ in two):
            return None
        first = self._ordered([*one[:i], t, *one[i + 1 :]])
        second = self._ordered([*two[:j], s, *two[j + 1 :]])
        return None if first is None or second is None else (first, second)

    def _reorder(self, path: LanePath) -> tuple[LanePath, ...] | None:
        found = self._ordered(list(path))
        return None if found is None or found == path else (found,)

    def _ordered(self, visits: list[tuple[int, int]]) -> LanePath | None:
        node = dict(visits)
        orders = orders_of(self.rules, tuple(sorted(node)))
        if not orders:
            return None
        order: Order = orders[self._below(len(orders))]
        return tuple((stage, node[stage]) for stage in order)


def search_routes(
    rules: RouteRules,
    times: RouteTimes,
    sizes: Sequence[int],
    waves: int,
    options: RouteSearch | None = None,
    *,
    told: Callable[[Routes], None] | None = None,
) -> Routes:
    """The best routes found. `sizes`: nodes by stage; `told` hears of each better one. Raises
    ValueError when no routes keep the rules."""
    options = options or RouteSearch()
    nodes = len(times.forward_s)
    if nodes < sum(sizes):
        raise ValueError(f"{nodes} nodes for stages of {sum(sizes)}: expected as many or more")
    rng = random.Random(options.seed)
    clock = RouteClock(times)
    moves = _Moves(rules, rng, options.alike)
    paths = first_paths(rules, sizes)
    states = [_State(placed(sizes, nodes), [paths] * waves) for _ in range(options.starts)]
    for state in states:
        _shuffle(state, rng)
        _rough(state, times, moves, rng, options.rough // options.starts)
    state = min(states, key=lambda s: max(clock.run(s.paths)))
    return _fine(state, clock, moves, rng, options.fine, told)


def _shuffle(state: _State, rng: random.Random) -> None:
    to = list(range(len(state.stage_of)))
    rng.shuffle(to)
    stage_of = state.stage_of[:]
    for node, other in enumerate(to):
        state.stage_of[other] = stage_of[node]
    state.paths = [
        [tuple((s, to[node]) for s, node in path) for path in wave] for wave in state.paths
    ]


def _apply(state: _State, change: Change, swapped: tuple[int, int] | None) -> None:
    for w, k, path in change:
        state.paths[w][k] = path
    if swapped is not None:
        x, y = swapped
        s = state.stage_of
        s[x], s[y] = s[y], s[x]


def _rough(
    state: _State, times: RouteTimes, moves: _Moves, rng: random.Random, iterations: int
) -> None:
    """Anneals the power mean of the lanes' round trips."""
    hop = (times.hop_s() + times.hop_s().T).tolist()
    visit, loss = times.visit_s().tolist(), times.loss_s.tolist()
    known: dict[LanePath, float] = {}

    def cost(path: LanePath) -> float:
        found = known.get(path)
        if found is None:
            found, before = loss[path[0][1]], path[-1][1]
            for _, node in path:
                found += visit[node] + hop[before][node]
                before = node
            known[path] = found
        return found

    lanes = [sum(map(cost, lane)) for lane in zip(*state.paths, strict=True)]
    scale = sum(lanes) / len(lanes)
    total = sum((x / scale) ** POWER for x in lanes)
    now = total**ROOT
    hot, cold = HOT * now, COLD * now
    best, kept = now, (state.stage_of[:], [w[:] for w in state.paths])
    for i in range(iterations):
        if len(known) > 300_000:
            known.clear()
        found = moves.draw(state)
        if found is None:
            continue
        change, swapped = found
        lane_change: dict[int, float] = {}
        for w, k, path in change:
            lane_change[k] = lane_change.get(k, 0.0) + cost(path) - cost(state.paths[w][k])
        after = total
        for k, d in lane_change.items():
            after += ((lanes[k] + d) / scale) ** POWER - (lanes[k] / scale) ** POWER
        energy = after**ROOT
        heat = hot * (cold / hot) ** (i / iterations)
        if energy <= now - heat * math.log(1.0 - rng.random()):
            now, total = energy, after
            for k, d in lane_change.items():
                lanes[k] += d
            _apply(state, change, swapped)
            if now < best - 1e-9:
                best, kept = now, (state.stage_of[:], [w[:] for w in state.paths])
    state.stage_of, state.paths = kept


def _fine(
    state: _State,
    clock: RouteClock,
    moves: _Moves,
    rng: random.Random,
    iterations: int,
    told: Callable[[Routes], None] | None,
) -> Routes:
    """Anneals the end of the step, with a little of the mean end."""

    def energy_of() -> tuple[float, float]:
        ends = clock.run(state.paths)
        step = max(ends)
        return step + GUIDE * sum(ends) / len(ends), step

    now, step = energy_of()
    best = state.frozen(step)
    # Waves one by one: microbatches of two that wait for each other for ever do not begin a search.
    scale = sum(max(clock.run([wave])) for wave in state.paths)
    hot, cold = FINE_HOT * scale, FINE_COLD * scale
    for i in range(iterations):
        found = moves.draw(state)
        if found is None:
            continue
        change, swapped = found
        back = [(w, k, state.paths[w][k]) for w, k, _ in change]
        _apply(state, change, swapped)
        energy, step = energy_of()
        heat = hot * (cold / hot) ** (i / iterations)
        if energy <= now - heat * math.log(1.0 - rng.random()):
            now = energy
            if step < best.step_s:
                best = state.frozen(step)
                if told is not None:
                    told(best)
        else:
            _apply(state, back, swapped)
    return best
