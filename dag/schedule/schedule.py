"""Schedules as data: what each peer does in a step, in which order.

The visits (forwards and backwards) come from `visits.py`, which holds the schedules; behind them
stand the exchanges and the update U, the same under every schedule. `dag/plan/action.py` says how
an action prints, `flow.py` what each takes and gives.
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
]


def step_actions(
    plan: Plan, stages: Sequence[Stage], exchanges: Iterable[Exchange]
) -> dict[PeerId, tuple[Action, ...]]:
    """The list of every peer for one training step: visits, then exchanges, then the update."""
    lists = visit_lists(plan, stages, plan.routes, training=True)
    trained = [e for e in exchanges if e.content is not ExchangeContent.SCORES]
    for peer in plan.peers:
        lists[peer] += exchange_actions(peer, trained)
        lists[peer].append(Action(Kind.UPDATE))
    return {peer: tuple(found) for peer, found in lists.items()}


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
