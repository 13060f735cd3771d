"""The exchanges of ghosts: what a peer gives, and what it does with results, on hashes.

`dag/exchange/` carries them out, as it does for tensors; gradients are added modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from ...dag.exchange import engine
from ...dag.exchange.collective import Hop
from ...dag.exchange.wiring import Exchange
from ...dag.plan.action import Action, ExchangeContent, Kind
from .hashes import MASK, Hash, Words
from .work import ActionTransfers, GhostAssignment, Local, Store

__all__ = ["carry_out"]


def carry_out(
    work: GhostAssignment, action: Action, part: ActionTransfers, store: Store
) -> Mapping[Local, Hash]:
    """Does an action of an exchange; returns what it leaves for others and for itself."""
    exchange = part.exchange
    assert exchange is not None, f"{action} is of no exchange"
    for t, at in part.takes:  # results made behind the loss
        training = exchange.content is ExchangeContent.NORM
        work.reported[training, t.microbatch][t.value] = cast(int, store[at])
    hops = [(hop, store[at]) for hop, at in part.came]
    space = work.shared.space(exchange)
    if action.kind is Kind.TAKE:
        _take(work, exchange, hops, space)
        return {}
    if action.kind is Kind.GIVE:
        given = engine.give(exchange, lambda hop: _own(work, exchange, hop), space)
    else:
        given = engine.pass_on(hops, space)
    found = {at: given(hop) for hop, at in part.goes}
    if exchange.content is ExchangeContent.SCORES:
        work.reported.clear()
    return found


def _own(work: GhostAssignment, exchange: Exchange, hop: Hop) -> Hash:
    """What the peer gives: words for a stage, an integer for all else."""
    k = exchange.index
    match exchange.content:
        case ExchangeContent.GRADIENT | ExchangeContent.DELTA:
            return work.held[k].gradients.copy()
        case ExchangeContent.SECOND:  # comes of what was added up already
            return np.zeros_like(work.held[k].gradients)
        case ExchangeContent.STATISTICS:
            return np.array([s & MASK for s in work.held[k].statistics.values()], np.uint64)
        case ExchangeContent.TIED | ExchangeContent.TIED_DELTA | ExchangeContent.TIED_PAIR:
            group = work.shared.tied[k]
            stage = group.stages[hop.part % len(group.stages)]
            return int(work.held[stage].named_gradients()[group.parameter])
        case ExchangeContent.NORM:
            hashes, total = work.shared.hashes, _scores(work, True)
            for stage, names in work.answers.items():
                gradients = work.held[stage].named_gradients()
                total += hashes.answered({p: gradients[p] for p in names})
            return total & MASK
        case ExchangeContent.SCORES:
            return _scores(work, False) & MASK


def _scores(work: GhostAssignment, training: bool) -> int:
    """The losses of the microbatches that were lost here."""
    loss = work.shared.hashes.loss
    return sum(loss(work.reported[training, m]) for m in work.ran[training])


def _take(
    work: GhostAssignment,
    exchange: Exchange,
    hops: Sequence[tuple[Hop, Hash]],
    space: engine.VectorSpace[Hash],
) -> None:
    k = exchange.index
    match exchange.content:
        case ExchangeContent.GRADIENT | ExchangeContent.DELTA:
            work.held[k].gradients = cast(Words, engine.take(hops, space))
        case ExchangeContent.SECOND:
            engine.take(hops, space)
        case ExchangeContent.STATISTICS:
            held = work.held[k]
            for hop, words in hops:
                if hop.source == work.order.peer:
                    continue
                theirs = cast(Words, words).tolist()
                for value, found in zip(held.linear.statistics, theirs, strict=True):
                    held.statistics[value] += found
        case ExchangeContent.TIED | ExchangeContent.TIED_DELTA | ExchangeContent.TIED_PAIR:
            total, group = cast(int, engine.take(hops, space)), work.shared.tied[k]
            for s in group.stages:
                if s in work.held:
                    held = work.held[s]
                    at = held.linear.trained.index(group.parameter)
                    held.gradients[at] = np.uint64(total)
        case ExchangeContent.NORM | ExchangeContent.SCORES:
            work.total = cast(int, engine.take(hops, space))
