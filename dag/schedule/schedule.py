"""Schedules as data: what each peer does in a step, in which order.

A plan lists the visits (forwards and backwards) of every peer, and nobody derives them again:
`listed` has its schedule (`orders/`) make the lists, `check_listed` proves them, whoever made them.
Behind the visits stand the exchanges and the update U, the same under every schedule. What a peer
gives to the sum of a stage's gradients it gives as soon as the stage's last backward is done, or
where weights' gradients are apart, the last of these: where it holds several stages, that is on its
way while the backwards of the others go on, and where to cut for that is the planner's to find
(wait-free backpropagation, merged: MG-WFBP, arXiv 1811.11141). Nothing is taken that early, since
then a slow link would hold up the backwards. `dag/plan/action.py` says how an
action prints, `flow.py` what each takes and gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..exchange.wiring import Exchange, level_of
from ..plan.action import EXCHANGES, TRAITS, VISITS, Action, ExchangeContent, Kind, ScheduleError
from ..plan.cut import Stage
from ..plan.plan import PeerId, Plan, PlanError, Visits
from ..plan.visit_lists import check_visits, halved_of, visits_by_peer
from .orders.list_scheduler import Bounds, ListScheduler, Times
from .orders.one_f_one_b import evaluation_order
from .orders.schedules import SCHEDULES

__all__ = [
    "EXCHANGES",
    "VISITS",
    "Action",
    "Kind",
    "ScheduleError",
    "check_listed",
    "evaluation_actions",
    "executed_s",
    "listed",
    "step_actions",
    "training_actions",
    "with_visits",
]


def listed(
    plan: Plan,
    stages: Sequence[Stage],
    times: Times | None = None,
    bounds: Bounds | None = None,
) -> Plan:
    """The plan with the visits of every peer, as its schedule orders them. `times` and `bounds`:
    see `orders/list_scheduler.py`."""
    by_peer = SCHEDULES[plan.schedule].order(plan, stages, times, bounds)
    visits = tuple(tuple(by_peer[p]) for p in plan.peers)
    if plan.full is not None:
        by_peer = SCHEDULES[plan.schedule].order(plan.in_full, stages, times, bounds)
        full = replace(plan.full, visits=tuple(tuple(by_peer[p]) for p in plan.peers))
        plan = replace(plan, full=full)
    return with_visits(plan, stages, visits)


def with_visits(plan: Plan, stages: Sequence[Stage], visits: Visits) -> Plan:
    """The plan with these visits of its peers, and those of an evaluation."""
    held_out = evaluation_order(plan, stages)
    return replace(plan, visits=visits, evaluations=tuple(tuple(held_out[p]) for p in plan.peers))


def check_listed(plan: Plan, stages: Sequence[Stage]) -> None:
    """Raises PlanError when a plan does not list its visits, when a list has other visits than the
    routes, or one out of order, or when peers that follow the lists wait for each other."""
    for forward, visits in ((Kind.FORWARD, plan.visits), (Kind.EVALUATE, plan.evaluations)):
        training = forward is Kind.FORWARD
        if len(visits) != len(plan.peers):
            raise PlanError(
                f"the plan lists the visits of {len(visits)} of {len(plan.peers)} peers"
            )
        routes = visits_by_peer(plan.routes if training else plan.evaluation_routes)
        for peer, mine in zip(plan.peers, visits, strict=True):
            check_visits(peer, mine, routes.get(peer, {}), forward)
            _check_ascending(peer, mine)
        apart = halved_of(plan) if training else ()
        _follow(plan, visits, ListScheduler(plan, stages, training=training, halved=apart))
    if plan.full is not None:
        check_listed(plan.in_full, stages)
        if halved_of(plan.in_full) != halved_of(plan):
            raise PlanError(
                "in full steps other stages have the gradients of their weights apart than in "
                "others: expected the same"
            )


def executed_s(plan: Plan, stages: Sequence[Stage], times: Times) -> float:
    """Seconds until the last visit of a step has ended, of peers that follow the plan's lists, with
    these times, links that carry one message after the other, and nothing that they share."""
    scheduler = ListScheduler(plan, stages, times, halved=halved_of(plan))
    _follow(plan, _of_all(plan, plan.visits), scheduler)
    return scheduler.ended


def _follow(plan: Plan, visits: Visits, scheduler: ListScheduler) -> None:
    """Has every peer do its visits in the order of its list. Raises PlanError where they stop."""
    lists = dict(zip(plan.peers, visits, strict=True))
    at = dict.fromkeys(plan.peers, 0)

    def follow(peer: PeerId) -> Action | None:
        if at[peer] == len(lists[peer]) or not scheduler.is_ready(lists[peer][at[peer]]):
            return None
        at[peer] += 1
        return lists[peer][at[peer] - 1]

    try:
        scheduler.run(follow)
    except PlanError as error:
        stuck = [f"{p} at {lists[p][at[p]]}" for p in plan.peers if at[p] < len(lists[p])]
        where = ", ".join(stuck[:4]) or "each is at the end of its list"
        raise PlanError(f"{error}: {where}") from None


def _check_ascending(peer: PeerId, visits: Iterable[Action]) -> None:
    """Gradients add up in the order of microbatches."""
    last: dict[tuple[Kind, int], int] = {}
    for action in visits:
        if last.setdefault((action.kind, action.stage), -1) >= action.microbatch:
            raise PlanError(
                f"{peer} has {action} behind microbatch {last[action.kind, action.stage]}: "
                "expected those of a stage in ascending order"
            )
        last[action.kind, action.stage] = action.microbatch


def step_actions(plan: Plan, exchanges: Iterable[Exchange]) -> dict[PeerId, tuple[Action, ...]]:
    """The list of every peer for one training step. Raises PlanError for a plan that lists no
    visits."""
    trained = [e for e in exchanges if e.content is not ExchangeContent.SCORES]
    return {
        peer: training_actions(peer, visits, trained)
        for peer, visits in zip(plan.peers, _of_all(plan, plan.visits), strict=True)
    }


def _of_all(plan: Plan, lists: Visits) -> Visits:
    if not lists:
        raise PlanError("the plan does not list its visits: expected one of schedule.listed")
    return lists


def training_actions(
    peer: PeerId, visits: Sequence[Action], exchanges: Sequence[Exchange]
) -> tuple[Action, ...]:
    """A peer's list: its visits, its part in the exchanges, of which it gives gradients between
    visits, and the update."""
    ends = {a.stage: a for a in visits if TRAITS[a.kind].adds_up}
    given: dict[Action, Action] = {}
    """By the last visit of a stage that adds up gradients."""
    behind = exchange_actions(peer, exchanges)
    for action in list(behind):
        gives = action.content is ExchangeContent.GRADIENT and action.kind is Kind.GIVE
        if gives and (end := ends.get(action.stage)) is not None:
            given[end] = action
            behind.remove(action)
    found = [a for visit in visits for a in (visit, given.get(visit)) if a is not None]
    return (*found, *behind, Action(Kind.UPDATE))


def evaluation_actions(
    plan: Plan, exchanges: Iterable[Exchange]
) -> dict[PeerId, tuple[Action, ...]]:
    """The list of every peer for one evaluation; all empty when the plan evaluates nothing."""
    scores = [e for e in exchanges if e.content is ExchangeContent.SCORES]
    return {
        peer: (*visits, *exchange_actions(peer, scores))
        for peer, visits in zip(plan.peers, _of_all(plan, plan.evaluations), strict=True)
    }


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
