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
    exchanges = _exchanges(plan, stages, tied)
    for peer in plan.peers:
        lists[peer] += exchanges[peer]
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
    plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup]
) -> dict[PeerId, list[Action]]:
    """S and T of every peer. Every giving comes before every adding up, and that before every
    taking, on all peers alike, with a row's sums and totals between them: so no two peers wait for
    each other."""
    kinds = (
        *(Kind.PAIR_GIVE, Kind.PAIR_COMBINE, Kind.PAIR_TAKE),
        *(Kind.SYNC_GIVE, Kind.SYNC_ROW, Kind.SYNC_COMBINE, Kind.SYNC_RELAY, Kind.SYNC_TAKE),
        *(Kind.TIED_GIVE, Kind.TIED_COMBINE, Kind.TIED_TAKE),
    )
    found: dict[PeerId, dict[Kind, list[Action]]] = {
        peer: {kind: [] for kind in kinds} for peer in plan.peers
    }
    for stage in stages:
        i, holders = stage.index, plan.stages[stage.index].holders
        if len(holders) < 2:
            continue
        gradient = shares_gradient(stage)
        # Statistics come from the holders that run microbatches; not every holder has to.
        ran = (
            {v.peer for r in plan.routes for v in r if v.stage == i} if stage.statistics else set()
        )
        for peer in holders:
            if gradient or peer in ran:
                found[peer][Kind.SYNC_GIVE].append(Action(Kind.SYNC_GIVE, stage=i))
            if gradient:
                if plan.stages[i].rows:
                    found[peer][Kind.SYNC_ROW].append(Action(Kind.SYNC_ROW, stage=i))
                    found[peer][Kind.SYNC_RELAY].append(Action(Kind.SYNC_RELAY, stage=i))
                if not plan.stages[i].ahead:
                    found[peer][Kind.SYNC_COMBINE].append(Action(Kind.SYNC_COMBINE, stage=i))
            if gradient or ran - {peer}:
                found[peer][Kind.SYNC_TAKE].append(Action(Kind.SYNC_TAKE, stage=i))
    for group in tied:
        holders_of = [plan.stages[i].holders for i in group.stages]
        hub = holders_of[0][0]
        for peer in dict.fromkeys(holders[0] for holders in holders_of):
            found[peer][Kind.TIED_GIVE].append(Action(Kind.TIED_GIVE, stage=group.index))
        found[hub][Kind.TIED_COMBINE].append(Action(Kind.TIED_COMBINE, stage=group.index))
        everybody = dict.fromkeys(p for holders in holders_of for p in holders)
        # Who steps ahead turns gradients into updates in S>, also those of tied parameters.
        for peer in everybody if plan.stages[group.stages[0]].ahead else ():
            first = peer in holders_of[0]
            found[peer][Kind.PAIR_GIVE].append(Action(Kind.PAIR_GIVE, stage=group.index))
            kind = Kind.PAIR_COMBINE if first else Kind.PAIR_TAKE
            found[peer][kind].append(Action(kind, stage=group.index))
        for peer in everybody:
            if peer != hub:
                found[peer][Kind.TIED_TAKE].append(Action(Kind.TIED_TAKE, stage=group.index))
    return {peer: [a for kind in kinds for a in of[kind]] for peer, of in found.items()}
