"""Proves action lists before anything runs, and prints them as time × peer.

The lists are replayed against the wiring (dag/schedule/replay.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.dag.exchange.wiring import LEVELS, level_of
from shoal.dag.plan.action import TRAITS, ExchangeContent
from shoal.dag.plan.cut import Stage, TiedGroup
from shoal.dag.plan.plan import PeerId, Plan
from shoal.dag.plan.visit_lists import halved
from shoal.dag.schedule.flow import Flow
from shoal.dag.schedule.replay import Link, Replay
from shoal.dag.schedule.schedule import (
    VISITS,
    Action,
    Kind,
    ScheduleError,
)

__all__ = ["Checked", "Link", "bubble", "check", "table", "timeline"]

Lists = Mapping[PeerId, Sequence[Action]]


def _evaluates(action: Action) -> bool:
    return action.kind is Kind.EVALUATE or action.content is ExchangeContent.SCORES


@dataclass(frozen=True)
class Checked:
    """What is proven of lists that can run."""

    order: tuple[tuple[PeerId, Action], ...]
    """One order of all actions in which everything is there when it is taken."""
    peak_live: dict[tuple[PeerId, int], int]
    """By (peer, stage): the most microbatches that have been forward and not yet backward."""
    peak_slots: dict[Link, int]
    """The most frames outstanding in any execution of these lists; see the module's docstring."""


def check(
    plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup], actions: Lists
) -> Checked:
    """Proves lists of one training step, of one evaluation, or of both in a row.

    Raises ScheduleError when an action is missing, repeated or not in the plan (so that something
    would be given twice, taken from nobody or taken by nobody), when a peer's own order is wrong,
    or when peers wait for each other.
    """
    flow = Flow(plan, stages, tied)
    _check_complete(flow, actions)
    for peer in plan.peers:
        _check_order(flow, peer, actions[peer])
    replay = Replay(flow, {p: [(0, a) for a in actions[p]] for p in plan.peers})
    order = tuple((peer, action) for peer, _, action in replay.run())
    return Checked(order, _peak_live(flow, actions), replay.peak_slots)


def _demanded(flow: Flow, peer: PeerId, apart: Collection[int]) -> set[Action]:
    """Every action that the plan wants of a peer, training and evaluation. `apart`: stages whose
    weights' gradients are visits of their own."""
    found = {a for a in flow.involved(peer) if a.kind not in VISITS} | {Action(Kind.UPDATE)}
    for m, route in enumerate(flow.plan.routes):
        for stage in (v.stage for v in route if v.peer == peer):
            found.add(Action(Kind.FORWARD, m, stage))
            if flow.stages[stage].has_backward:
                found.add(Action(Kind.BACKWARD, m, stage))
            if stage in apart:
                found.add(Action(Kind.WEIGHT, m, stage))
    for m, route in enumerate(flow.plan.evaluation_routes):
        found |= {Action(Kind.EVALUATE, m, v.stage) for v in route if v.peer == peer}
    return found


def _check_complete(flow: Flow, actions: Lists) -> None:
    strangers = [peer for peer in actions if peer not in flow.plan.peers]
    if strangers:
        raise ScheduleError(f"there is a list for {strangers[0]}, which holds no stage of the plan")
    absent = [peer for peer in flow.plan.peers if peer not in actions]
    if absent:
        raise ScheduleError(f"there is no list for {absent[0]}, which holds a stage of the plan")
    given = {_evaluates(a) for found in actions.values() for a in found}
    evaluates = True in given
    trains = False in given or not evaluates
    for peer in flow.plan.peers:
        every = _demanded(flow, peer, halved(actions[peer]))
        demanded = {a for a in every if (evaluates if _evaluates(a) else trains)}
        for action, count in Counter(actions[peer]).items():
            if action not in demanded:
                raise ScheduleError(f"{peer} has {action}, which the plan does not give it")
            if count > 1:
                gives = "".join(f": {t} would be given twice" for t in flow.gives(peer, action)[:1])
                raise ScheduleError(f"{peer} has {action} {count} times{gives}")
        missing = sorted(demanded - set(actions[peer]))
        if missing:
            action = missing[0]
            why = [
                f"{t.destination} takes {t} in {flow.taken_by[t]} and nobody gives it"
                for t in flow.gives(peer, action)
            ] + [
                f"{t.source} gives {t} in {flow.given_by[t]} and nobody takes it"
                for t in flow.takes(peer, action)
            ]
            raise ScheduleError(f"{peer} lacks {action}" + "".join(f": {w}" for w in why[:1]))


def _before(
    flow: Flow, peer: PeerId, action: Action, present: Sequence[Action]
) -> Iterator[Action]:
    """Actions of the same list that must stand before this one; those that are absent count not."""
    if action.kind is Kind.BACKWARD:
        yield Action(Kind.FORWARD, action.microbatch, action.stage)
    elif action.kind is Kind.WEIGHT:
        yield Action(Kind.BACKWARD, action.microbatch, action.stage)
    elif action.kind is Kind.UPDATE:
        yield from (a for a in present if a.content is ExchangeContent.NORM)
    elif action.content is not None:
        own = [a for a in present if (a.content, a.stage) == (action.content, action.stage)]
        yield from (a for a in own if a.phase < action.phase)
        if action.kind is Kind.GIVE:
            yield from _made_from(flow, action, present)


def _made_from(flow: Flow, action: Action, present: Sequence[Action]) -> Iterator[Action]:
    """What must have happened before a peer can give its part of an exchange."""
    content = action.content
    assert content is not None, f"{action} is of no exchange"
    below = level_of(content)
    if content is ExchangeContent.SCORES:
        yield from (a for a in present if a.kind is Kind.EVALUATE)
        return
    visits = [a for a in present if TRAITS[a.kind].trains]
    others = [a for a in present if a.content is not None and level_of(a.content) < below]
    if content is not ExchangeContent.NORM:
        of_group = content in LEVELS[0] | LEVELS[2]
        mine = flow.tied[action.stage].stages if of_group else (action.stage,)
        groups = [g.index for g in flow.tied if set(mine) & set(g.stages)]
        visits = [a for a in visits if a.stage in mine]
        others = [a for a in others if a.stage in (groups if a.content in LEVELS[0] else mine)]
    yield from (*visits, *others)


def _check_order(flow: Flow, peer: PeerId, actions: Sequence[Action]) -> None:
    at = {action: i for i, action in enumerate(actions)}
    for i, action in enumerate(actions):
        for earlier in _before(flow, peer, action, actions):
            if at.get(earlier, -1) > i:
                raise ScheduleError(f"{peer} has {action} before {earlier}: expected it behind it")


def _peak_live(flow: Flow, actions: Lists) -> dict[tuple[PeerId, int], int]:
    peak: dict[tuple[PeerId, int], int] = {}
    for peer, found in actions.items():
        live: Counter[int] = Counter()
        for action in found:
            if action.kind is Kind.FORWARD:
                live[action.stage] += 1
                key = (peer, action.stage)
                peak[key] = max(peak.get(key, 0), live[action.stage])
                if not flow.stages[action.stage].has_backward:
                    live[action.stage] -= 1  # nothing is kept behind its forward
            elif action.kind is Kind.BACKWARD:
                live[action.stage] -= 1
    return peak


def timeline(
    plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup], actions: Lists
) -> dict[PeerId, tuple[tuple[int, Action], ...]]:
    """When each action starts if every action takes one unit and a transfer none."""
    flow = Flow(plan, stages, tied)
    end: dict[tuple[PeerId, Action], int] = {}
    free = dict.fromkeys(plan.peers, 0)
    found: dict[PeerId, list[tuple[int, Action]]] = {peer: [] for peer in plan.peers}
    for peer, action in check(plan, stages, tied, actions).order:
        given = (end[t.source, flow.given_by[t]] for t in flow.takes(peer, action))
        start = max(free[peer], *given, 0)
        found[peer].append((start, action))
        free[peer] = end[peer, action] = start + 1
    return {peer: tuple(rows) for peer, rows in found.items()}


def bubble(plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup], actions: Lists) -> float:
    """Idle share of peers × time, from the first visit to the last, in unit times.

    (K - 1) / (M + K - 1) for a chain of K stages on K peers and M microbatches; interleaved, with v
    stages on each of K peers and M a multiple of K, (K - 1) / (v * M + K - 1).
    """
    rows = timeline(plan, stages, tied, actions).values()
    starts = [start for row in rows for start, action in row if action.kind in VISITS]
    length = max(starts, default=-1) + 1
    return 1 - len(starts) / (length * len(plan.peers)) if length else 0.0


def table(plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup], actions: Lists) -> str:
    """Time × peer: one row per peer, one column per unit of time, `·` where a peer is idle. Visits
    of a peer with one stage are printed without it."""
    rows = timeline(plan, stages, tied, actions)
    length = max((start + 1 for row in rows.values() for start, _ in row), default=0)
    lines: list[list[str]] = []
    for peer, row in rows.items():
        held = plan.stages_of(peer)
        cells = ["·"] * length
        for start, action in row:
            alone = action.kind in VISITS and len(held) == 1
            cells[start] = str(action).partition("@")[0] if alone else str(action)
        lines.append([f"{peer} [{','.join(map(str, held))}]", *cells])
    lines.insert(0, ["", *map(str, range(length))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    idle = bubble(plan, stages, tied, actions)
    return "\n".join([*text, f"bubble {100 * idle:.1f} % of {len(rows)} peers × time in visits"])
