"""Schedules as data: what each peer does in a step, in which order.

The visits (forwards and backwards) come from `visits.py`, which holds the schedules; behind them
stand the exchanges S, T and N and the update U, the same under every schedule. `action.py` says how
an action prints, `flow.py` what each takes and gives; `check.py` proves lists and prints them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .action import EXCHANGES, VISITS, Action, Kind, ScheduleError
from .cut import Stage, TiedGroup
from .plan import PeerId, Plan
from .visits import visit_lists

__all__ = [
    "EXCHANGES",
    "VISITS",
    "Action",
    "Kind",
    "ScheduleError",
    "evaluation_actions",
    "hub_of",
    "shares_gradient",
    "step_actions",
]


def hub_of(plan: Plan, stages: Sequence[Stage]) -> PeerId:
    """The peer that adds up norms and results: the first holder of the stage of the loss."""
    return next(plan.stages[s.index].holders[0] for s in stages if s.makes_loss)


def shares_gradient(stage: Stage) -> bool:
    """Whether several holders of the stage would have gradients to add up."""
    return stage.has_backward and bool(stage.trainable)


def step_actions(
    plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup]
) -> dict[PeerId, tuple[Action, ...]]:
    """The list of every peer for one training step: visits, then S, T, N and U."""
    lists = visit_lists(plan, stages, plan.routes, training=True)
    hub = hub_of(plan, stages)
    for peer in plan.peers:
        lists[peer] += _exchanges(plan, stages, tied, peer)
        lists[peer].append(Action(Kind.NORM_GIVE))
        lists[peer].append(Action(Kind.NORM_COMBINE if peer == hub else Kind.NORM_TAKE))
        lists[peer].append(Action(Kind.UPDATE))
    return {peer: tuple(found) for peer, found in lists.items()}


def evaluation_actions(plan: Plan, stages: Sequence[Stage]) -> dict[PeerId, tuple[Action, ...]]:
    """The list of every peer for one evaluation; all empty when the plan evaluates nothing."""
    lists = visit_lists(plan, stages, plan.evaluation_routes, training=False)
    if plan.evaluation_routes:
        loss_stage = next(s.index for s in stages if s.makes_loss)
        for peer in plan.peers:
            if any(a.kind is Kind.EVALUATE and a.stage == loss_stage for a in lists[peer]):
                lists[peer].append(Action(Kind.EVAL_GIVE))
        lists[hub_of(plan, stages)].append(Action(Kind.EVAL_COMBINE))
    return {peer: tuple(found) for peer, found in lists.items()}


def _exchanges(
    plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup], peer: PeerId
) -> list[Action]:
    """S and T of a peer. Every giving comes before every adding up, and that before every taking,
    on all peers alike: so no two peers wait for each other."""
    gives: list[Action] = []
    adds: list[Action] = []
    takes: list[Action] = []
    for stage in stages:
        i, holders = stage.index, plan.stages[stage.index].holders
        if peer not in holders or len(holders) < 2:
            continue
        gradient = shares_gradient(stage)
        # Statistics come from the holders that run microbatches; not every holder has to.
        ran = (
            {v.peer for r in plan.routes for v in r if v.stage == i} if stage.statistics else set()
        )
        if gradient or peer in ran:
            gives.append(Action(Kind.SYNC_GIVE, stage=i))
        if gradient:
            adds.append(Action(Kind.SYNC_COMBINE, stage=i))
        if gradient or ran - {peer}:
            takes.append(Action(Kind.SYNC_TAKE, stage=i))
    found = gives + adds + takes
    for kind in (Kind.TIED_GIVE, Kind.TIED_COMBINE, Kind.TIED_TAKE):
        for group in tied:
            holders_of = [plan.stages[i].holders for i in group.stages]
            hub = holders_of[0][0]
            if (
                (kind is Kind.TIED_GIVE and any(peer == holders[0] for holders in holders_of))
                or (kind is Kind.TIED_COMBINE and peer == hub)
                or (kind is Kind.TIED_TAKE and peer != hub and any(peer in h for h in holders_of))
            ):
                found.append(Action(kind, stage=group.index))
    return found
