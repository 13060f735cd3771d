"""What a stage takes on its device, from graph and costs alone; the peak over one pass of its
operators is followed, not bounded (`memory_table.py`).

    peer       = Σ over its stages of standing
               + max(max over its actions of (Σ live · kept + transient of the action's stage),
                     max over its stages of update, Σ over its stages of exchange,
                     Σ over its stages of meets)
    standing   = parameters + buffers + trainable (gradients) + state · trained numbers
    kept       = of one microbatch between its forward and its backward, each storage once: what
                 autograd saves, the values received, those sent that a gradient comes back for,
                 the data; a stage that recomputes keeps what it received and the data
    live       = microbatches between forward and backward, that of the action included
    waiting    = likewise, those whose weights' gradients wait, where a list has them apart: of each
                 there is what `weight_costs.py` says, beside Σ live · kept
    transient  = max(forward, backward) - kept + the next microbatch's values and gradients, which
                 came and wait for their action:
      forward  = max over operators i of what is there while i runs
      backward = max over operators i of (kept not yet freed + gradients of values that cross i
                 + what i makes while it runs) + gradients received;
                 a stage that recomputes runs its forward before that, with its saved set in here
    update     = the optimizer's temporaries, when nothing is kept: two of the largest parameter
                 (torch goes through them one by one on a CPU), with moments in 8 bits more of one
                 with few elements (`optimizer_states.py`)
    meets      = of a run with rounds between replicas, while one is exchanged and no step is made:
                 so many bytes of each trained number, and the temporaries of the largest, which
                 are the update's; there are no gradients then
    exchange   = gradients in one vector and those of others, when nothing is kept: 2 · trainable
                 of a stage with several holders; by any collective as much, as the vector is
                 gathered into what goes to the row, and all who answer there have equal shares

Storages are followed as in `cost.py`: views of one storage count once, from when its first value
is made to when the last one is read. Bytes inside a kernel are known for convolutions only, whose
layouts are changed for the library (`count.py`). Gradients stand from the first forward on, though
they come with the first backward: where all microbatches are live before it, that much too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..ir.graph import Graph
from ..plan.action import TRAITS, Action
from ..plan.plan import Plan
from ..plan.visit_lists import halved
from .cost import OperatorCost
from .memory_table import MemoryTable
from .storages import Storages
from .weight_costs import WaitingMemory

__all__ = ["MemoryModel", "Moments", "StageMemory", "live_moments"]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a stage; see the module."""

    weights: int
    """Parameters and buffers."""
    trainable: int
    """Bytes of the parameters that are trained; each gradient and copy is as large."""
    numbers: int
    """Numbers in them; one of 64 bits counts as two. Where moments are in 8 bits, bytes of one."""
    changing: int
    """Bytes of the trained parameters, and of the buffers that steps update."""
    kept: int
    transient: int
    update: int
    meets: int
    arrives: int
    """Values and gradients of the next microbatch, which are in `transient`."""

    def standing(self, state_bytes: int, copies: int = 0) -> int:
        """`state_bytes`: of the optimizer, per trained number; `copies`: of the trained parameters
        beside them."""
        return self.weights + (1 + copies) * self.trainable + state_bytes * self.numbers

    def snapshot(self, state_bytes: int) -> int:
        """What must be copied to go on after a step; the rest is in the run's weights files."""
        return self.changing + state_bytes * self.numbers

    @property
    def exchange(self) -> int:
        """Where it has several holders."""
        return 2 * self.trainable

    def peak(self, state_bytes: int, live: int, shared: bool = False, copies: int = 0) -> int:
        """With at most `live` microbatches between forward and backward, alone on its peer."""
        after = max(self.update, self.meets, shared * self.exchange)
        return self.standing(state_bytes, copies) + max(live * self.kept + self.transient, after)


Moments = tuple[tuple[int, tuple[int, ...]], ...]
"""(stage that computes, live microbatches of each stage of its peer, in the plan's order, and where
some wait for their weights' gradients, behind them how many of each)."""


def live_moments(
    actions: Sequence[Action], held: Sequence[int], backward: Sequence[bool]
) -> Moments:
    """The moments in a peer's list for a training step (`held`: its stages) at its forwards and
    backwards, that microbatch included; only those with more live ones of some stage than every
    other moment of the same stage has. `backward`: whether a stage of the plan has one."""
    place = {k: at for at, k in enumerate(held)}
    apart = halved(actions)
    live = [0] * (len(held) * (2 if apart else 1))
    seen: dict[int, dict[tuple[int, ...], None]] = {k: {} for k in held}
    for action in actions:
        k = action.stage
        keeps, defers = TRAITS[action.kind].keeps, TRAITS[action.kind].defers
        if not keeps and not defers:
            continue
        live[place[k]] += max(0, keeps)
        if k in apart:
            live[len(held) + place[k]] += max(0, defers)
        seen[k][tuple(live)] = None
        live[place[k]] += min(0, keeps) if backward[k] else -keeps
        if k in apart:
            live[len(held) + place[k]] += min(0, defers)
    return tuple((k, n) for k in held for n in _surpassed_by_none(list(seen[k])))


def _surpassed_by_none(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    rows.sort(reverse=True)
    kept: list[tuple[int, ...]] = []
    for row in rows:
        if not any(all(a <= b for a, b in zip(row, other, strict=True)) for other in kept):
            kept.append(row)
    return kept


class MemoryModel:
    """The memory that the intervals of one bound graph take; answers for any interval of its
    operators in time of its length."""

    def __init__(
        self,
        graph: Graph,
        costs: Sequence[OperatorCost],
        meets: int = 0,
        *,
        in_8_bits: bool = False,
    ) -> None:
        """`meets`: bytes of each trained number while a round is exchanged; 0: there are none.
        `in_8_bits`: the optimizer's moments are (`optimizer_states.py`), and what is asked for with
        `state_bytes` of a number counts each number as the bytes of a moment of it."""
        self.meets = meets
        self.storages = Storages.of(graph, costs, in_8_bits=in_8_bits)
        self.waiting = WaitingMemory(graph, costs)
        self._known: dict[tuple[int, int, bool], StageMemory] = {}

    def stage(self, start: int, stop: int, recompute: bool = False) -> StageMemory:
        """Operators [start, stop) for one microbatch."""
        key = (start, stop, recompute)
        if key not in self._known:
            part = self.storages.part(start, stop)
            table = MemoryTable(part, np.array([0, stop - start]), self.meets)
            for again in (False, True):
                tables = (
                    table.weights,
                    table.trainable,
                    table.numbers,
                    table.changing,
                    table.kept[again],
                    table.transient[again],
                    table.update,
                    table.meets,
                    table.arrives,
                )
                self._known[start, stop, again] = StageMemory(*(int(t[1, 0]) for t in tables))
        return self._known[key]

    def peer_bytes(
        self,
        plan: Plan,
        held: Sequence[int],
        moments: Moments,
        state_bytes: int,
    ) -> int:
        """Peak bytes on a peer that holds these stages of a plan: all of them stand and keep, and
        one of them computes. `state_bytes`: of the optimizer, per trained number; beside that a
        stage has the copies that its strategy keeps."""
        found = {}
        for k in held:
            slot = plan.stages[k]
            found[k] = self.stage(slot.start, slot.stop, slot.recompute)
        after = max(
            *(found[k].update for k in held),
            sum(found[k].meets for k in held),
            sum(found[k].exchange for k in held if len(plan.stages[k].holders) > 1),
        )
        each, transient = [found[k].kept for k in held], {k: found[k].transient for k in held}
        if any(len(live) > len(held) for _, live in moments):
            for k in held:
                size, during = self.waiting.of(plan.stages[k].start, plan.stages[k].stop)
                each.append(size)
                transient[k] = max(transient[k], during + found[k].arrives)
        computed = (
            transient[k] + sum(n * size for n, size in zip(live, each, strict=False))
            for k, live in moments
        )
        most = max(computed, default=0)  # a holder may be on no route
        standing = sum(found[k].standing(state_bytes, plan.strategy(k).traits.copies) for k in held)
        return standing + max(most, after)
