"""The exchanges of ghosts: what each action between two stages' holders makes of its hashes.

One function for each kind of action. It takes what the action's transfers left in the step's values
and gives what they carry on, by port; gradients are added modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from ...dag.schedule import Action, Kind
from .hashes import MASK, Words
from .work import Made, Part, Store, Work

__all__ = ["EXCHANGES"]


def _sync_give(work: Work, action: Action, part: Part, store: Store) -> Made:
    k, held = action.stage, work.held[action.stage]
    shared, made = work.shared, Made()
    if held.linear.trained:
        words, grid = shared.shards(k).cut(held.gradients), shared.flow.grids[k]
        if shared.plan.stages[k].ahead:
            made[f"S{k}>ahead"] = held.gradients.copy()
        elif grid is None:
            holders = shared.plan.stages[k].holders
            made[f"S{k}>grad"] = dict(zip(holders, words, strict=True))
        else:
            gathered, members = shared.shards(k).gathered, grid.row(work.order.peer)
            made[f"S{k}>row"] = {m: gathered(words, grid.answers[m]) for m in members}
    if held.linear.statistics:
        sums = [s & MASK for s in held.statistics.values()]
        made[f"S{k}>stats"] = np.array(sums, np.uint64)
    return made


def _sync_row(work: Work, action: Action, part: Part, store: Store) -> Made:
    k, grid = action.stage, work.shared.flow.grids[action.stage]
    assert grid is not None, f"{action} in a stage without rows"
    answers = grid.answers[work.order.peer]
    sums = work.shared.shards(k).split(_sum(store, part), answers)
    owners = [grid.holders[shard] for shard in answers]
    return {f"S{k}=row": dict(zip(owners, sums, strict=True))}


def _sync_combine(work: Work, action: Action, part: Part, store: Store) -> Made:
    k, total = action.stage, _sum(store, part)
    if work.shared.flow.grids[k] is not None:
        return {f"S{k}+row": total}
    work.sums[k] = total
    return {f"S{k}+grad": total}


def _sync_relay(work: Work, action: Action, part: Part, store: Store) -> Made:
    totals = [cast(Words, store[at]) for _, at in part.takes]
    return {f"S{action.stage}*row": np.concatenate(totals)}


def _sync_take(work: Work, action: Action, part: Part, store: Store) -> Made:
    k, held = action.stage, work.held[action.stage]
    for t, at in part.takes:
        if t.port.endswith(">ahead"):
            held.gradients += cast(Words, store[at])
    if k in work.sums:
        by_holder = {t.source: store[at] for t, at in part.takes if t.port.endswith("+grad")}
        by_holder[work.order.peer] = work.sums.pop(k)
        shards = [cast(Words, by_holder[h]) for h in work.shared.plan.stages[k].holders]
        held.gradients = work.shared.shards(k).join(shards)
    rows = {t.source: cast(Words, store[at]) for t, at in part.takes if t.port.endswith("*row")}
    if rows and (grid := work.shared.flow.grids[k]):
        parts = [(grid.answers[member], words) for member, words in rows.items()]
        held.gradients = work.shared.shards(k).scattered(parts)
    for t, at in part.takes:
        if t.port.endswith(">stats"):
            theirs = cast(Words, store[at]).tolist()
            for value, found in zip(held.linear.statistics, theirs, strict=True):
                held.statistics[value] += found
    return {}


def _pair_give(work: Work, action: Action, part: Part, store: Store) -> Made:
    group = work.shared.tied[action.stage]
    return {
        f"t{group.index}>{s}": work.held[s].named_gradients()[group.parameter]
        for s in group.stages
        if s in work.held
    }


def _pair_combine(work: Work, action: Action, part: Part, store: Store) -> Made:
    total = sum(cast(int, store[at]) for _, at in part.takes) & MASK
    _set_tied(work, action.stage, total)
    return {f"t{action.stage}+": total}


def _tied_give(work: Work, action: Action, part: Part, store: Store) -> Made:
    group, port = work.shared.tied[action.stage], work.shared.flow.tied_port(action.stage)
    return {
        f"{port}>{s}": work.held[s].named_gradients()[group.parameter]
        for s in group.stages
        if s in work.held and work.first_of(s)
    }


def _tied_combine(work: Work, action: Action, part: Part, store: Store) -> Made:
    came = [cast(int, store[at]) for _, at in part.takes]
    if work.shared.flow.steps_ahead(action.stage):
        assert len(set(came)) == 1, "each stage has the sum of all holders"
        total = came[0]  # their mean
    else:
        total = sum(came) & MASK
    _set_tied(work, action.stage, total)
    return {f"{work.shared.flow.tied_port(action.stage)}+": total}


def _tied_take(work: Work, action: Action, part: Part, store: Store) -> Made:
    ((_, at),) = part.takes
    _set_tied(work, action.stage, cast(int, store[at]))
    return {}


def _set_tied(work: Work, index: int, total: int) -> None:
    group = work.shared.tied[index]
    for s in group.stages:
        if s in work.held:
            held = work.held[s]
            held.gradients[held.linear.trained.index(group.parameter)] = np.uint64(total)


def _norm_give(work: Work, action: Action, part: Part, store: Store) -> Made:
    hashes, total = work.shared.hashes, _scores(work, True, part, store)
    for k, names in work.answers.items():
        gradients = work.held[k].named_gradients()
        total += hashes.answered({p: gradients[p] for p in names})
    return {"N>": total & MASK}


def _norm_combine(work: Work, action: Action, part: Part, store: Store) -> Made:
    """N+, and V+: the sum of what came."""
    work.total = sum(cast(int, store[at]) for _, at in part.takes) & MASK
    return {"N+": work.total}


def _norm_take(work: Work, action: Action, part: Part, store: Store) -> Made:
    ((_, at),) = part.takes
    work.total = cast(int, store[at])
    return {}


def _eval_give(work: Work, action: Action, part: Part, store: Store) -> Made:
    total = _scores(work, False, part, store)
    work.reported.clear()
    return {"V>": total & MASK}


def _scores(work: Work, training: bool, part: Part, store: Store) -> int:
    """The losses of the microbatches that were lost here; `part` brings late results."""
    for t, at in part.takes:
        work.reported[training, t.microbatch][t.value] = cast(int, store[at])
    loss = work.shared.hashes.loss
    return sum(loss(work.reported[training, m]) for m in work.ran[training])


def _sum(store: Store, part: Part) -> Words:
    found: Words = np.add.reduce(np.array([store[at] for _, at in part.takes], np.uint64), 0)
    return found


EXCHANGES: dict[Kind, Callable[[Work, Action, Part, Store], Made]] = {
    Kind.SYNC_GIVE: _sync_give,
    Kind.SYNC_ROW: _sync_row,
    Kind.SYNC_COMBINE: _sync_combine,
    Kind.SYNC_RELAY: _sync_relay,
    Kind.SYNC_TAKE: _sync_take,
    Kind.PAIR_GIVE: _pair_give,
    Kind.PAIR_COMBINE: _pair_combine,
    Kind.PAIR_TAKE: _tied_take,
    Kind.TIED_GIVE: _tied_give,
    Kind.TIED_COMBINE: _tied_combine,
    Kind.TIED_TAKE: _tied_take,
    Kind.NORM_GIVE: _norm_give,
    Kind.NORM_COMBINE: _norm_combine,
    Kind.NORM_TAKE: _norm_take,
    Kind.EVAL_GIVE: _eval_give,
    Kind.EVAL_COMBINE: _norm_combine,
}
