"""Assignments in a world, read once for all of its peers: they get the same graph and plan, and a
thousand peers would read them a thousand times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ...dag.cost.cost import cost
from ...dag.cost.pace import IntervalWork, Vectors, action_work
from ...dag.cost.speed import Speeds, Work
from ...dag.exchange.wiring import exchanges_of
from ...dag.plan.cut import cut, tied_groups
from ...dag.plan.plan import PeerId
from ...dag.schedule.schedule import Action
from ...peer.blobs.starting import Starting
from ...peer.blobs.weights import Read
from ...peer.compute.order import BuildOrder, order_from_assign, starting_weights
from ...proto import broker_pb2

__all__ = ["ActionTimes", "Orders"]

_REMEMBERED = 4


class ActionTimes:
    """How long the actions of an assignment take on one peer: the cost model's seconds."""

    def __init__(self, work: Callable[[PeerId, Action], Work], peer: PeerId, speeds: Speeds):
        self._work, self._peer, self._speeds = work, peer, speeds
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self, action: Action) -> float:
        # Visits of one stage take equally long.
        visit = action.content is None
        key: tuple[object, ...] = (action.kind, action.stage) if visit else action
        if key not in self._known:
            self._known[key] = self._speeds.seconds(self._work(self._peer, action))
        return self._known[key]


@dataclass(frozen=True)
class _Read:
    order: BuildOrder
    work: Callable[[PeerId, Action], Work]


class Orders:
    """Reads the assignments of a world, each once for all of its peers."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Read] = {}

    def read(
        self,
        peer: str,
        assign: broker_pb2.Assign,
        speeds: Speeds,
        *,
        blob: Callable[[str], bytes],
        read: Read,
        shard: Callable[[str], Path],
        parts: tuple[tuple[memoryview, ...], ...] = (),
    ) -> tuple[BuildOrder, ActionTimes]:
        """As `order_from_assign`; `blob` gives a whole blob by its hash, and is asked for all that
        this peer fetches."""
        refs = (assign.full_graph, assign.graph, assign.data, assign.recipe)
        hashes = tuple(ref.hash for ref in refs if ref.hash)
        fetched = {name: blob(name) for name in hashes}
        plan = assign.plan.SerializeToString(deterministic=True)
        key = (assign.run, assign.term, *hashes, plan, assign.training)
        known = self._known.get(key)
        if known is None:
            order = order_from_assign(
                peer, assign, blob=lambda ref: fetched[ref.hash], read=read, shard=shard
            )
            known = self._known[key] = _Read(order, _work(order))
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        begun = known.order.weights
        recipe = begun.recipe if isinstance(begun, Starting) else None
        mine = replace(
            known.order,
            peer=PeerId(peer),
            weights=starting_weights(assign, read, recipe, lambda shard: blob(shard.hash)),
            shard=shard,
            resumed=parts,
        )
        return mine, ActionTimes(known.work, mine.peer, speeds)


def _work(order: BuildOrder) -> Callable[[PeerId, Action], Work]:
    plan = order.plan
    graph = order.graph.bind(plan.microbatch_size)
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    tied = tied_groups(graph, stages)
    return action_work(
        plan,
        stages,
        {(e.content, e.index): e for e in exchanges_of(plan, stages, tied)},
        Vectors(plan, stages, tied, graph),
        IntervalWork(cost(graph)),
        optimizer_slots=2 if order.training.train.optimizer == "adamw" else 1,
    )
