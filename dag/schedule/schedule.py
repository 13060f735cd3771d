"""Schedules as data: what each peer does in a step, in which order.

The visits (forwards and backwards) come from `visits.py`, which holds the schedules; behind them
stand the exchanges and the update U, the same under every schedule. What a peer gives to the sum of
a stage's gradients it gives as soon as the stage's last backward is done: where it holds several
stages, that is on its way while the backwards of the others go on, and where to cut for that is the
planner's to find (wait-free backpropagation, merged: MG-WFBP, arXiv 1811.11141). Nothing is taken
that early, since then a slow link would hold up the backwards. `dag/plan/action.py` says how an
action prints, `flow.py` what each takes and gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..exchange.wiring import Exchange, level_of
from ..plan.action import EXCHANGES, VISITS, Action, ExchangeContent, Kind, ScheduleError
from ..plan.cut import Stage
from ..plan.plan import PeerId, Plan
from .visits import visit_lists

__all__ = [
    "EXCHANGES",
    "VISITS",
    "Action",
    "Kind",
    "ScheduleError",
    "evaluation_actions",
    "step_actions",
    "training_actions",
]


def step_actions(
    plan: Plan, stages: Sequence[Stage], exchanges: Iterable[Exchange]
) -> dict[PeerId, tuple[Action, ...]]:
    """The list of every peer for one training step."""
    lists = visit_lists(plan, stages, plan.routes, training=True)
    trained = [e for e in exchanges if e.content is not ExchangeContent.SCORES]
    return {peer: training_actions(peer, lists[peer], trained) for peer in plan.peers}


def training_actions(
    peer: PeerId, visits: Sequence[Action], exchanges: Sequence[Exchange]
) -> tuple[Action, ...]:
    """A peer's list: its visits, its part in the exchanges, of which it gives gradients between
    visits, and the update."""
    ends = {a.stage: a for a in visits if a.kind is Kind.BACKWARD}
    given: dict[Action, Action] = {}
    """By last backward of a stage."""
    behind = exchange_actions(peer, exchanges)
    for action in list(behind):
        gives = action.content is ExchangeContent.GRADIENT and action.kind is Kind.GIVE
        if gives and (end := ends.get(action.stage)) is not None:
            given[end] = action
            behind.remove(action)
    found = [a for visit in visits for a in (visit, given.get(visit)) if a is not None]
    return (*found, *behind, Action(Kind.UPDATE))


def evaluation_actions(
    plan: Plan, stages: Sequence[Stage], exchanges: Iterable[Exchange]
) -> dict[PeerId, tuple[Action, ...]]:
    """The list of every peer for one evaluation; all empty when the plan evaluates nothing."""
    lists = visit_lists(plan, stages, plan.evaluation_routes, training=False)
    scores = [e for e in exchanges if e.content is ExchangeContent.SCORES]
    return {peer: (*found, *exchange_actions(peer, scores)) for peer, found in lists.items()}


def exchange_actions(peer: PeerId, exchanges: Sequence[Exchange]) -> list[Action]:
    """A peer's part in exchanges: level after level, and in each all lower phases before higher
    ones, on all peers alike. What is taken was given in a lower phase or level: so no two peers
    wait for each other, whatever the collectives."""
    found: list[tuple[int, int, int, ExchangeContent, Action]] = []
    for exchange in exchanges:
        level = level_of(exchange.content)
        for phase in exchange.phases(peer):
            action = exchange.action(peer, phase)
            found.append((level, phase, exchange.index, exchange.content, action))
    return [action for *_, action in sorted(found)]
