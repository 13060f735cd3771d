"""Assignments in a world, whose graph is read once for all of its peers: a thousand would read it a
thousand times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ...dag.cost.cost import cost
from ...dag.cost.pace import IntervalWork, Vectors, action_work
from ...dag.cost.speed import Speeds, Work
from ...dag.exchange.wiring import exchanges_of
from ...dag.plan.action import ROUNDS, Action, Kind
from ...dag.plan.cut import bare_stages, cut, tied_groups
from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.visit_lists import halved_of
from ...dag.schedule.convert_slice import slice_from_proto
from ...dag.schedule.flow import Flow
from ...peer.blobs.starting import Starting
from ...peer.blobs.weights import Read
from ...peer.compute.order import BuildOrder, order_from_assign, starting_weights
from ...proto import broker_pb2

__all__ = ["ActionTimes", "Orders"]

_REMEMBERED = 8


class ActionTimes:
    """How long the actions of an assignment take on one peer: the cost model's seconds."""

    def __init__(self, work: Callable[[PeerId, Action], Work], peer: PeerId, speeds: Speeds):
        self._work, self._peer, self._speeds = work, peer, speeds
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self, action: Action) -> float:
        if action.kind in ROUNDS:  # one pass over what is trained, as an update is
            action = Action(Kind.UPDATE)
        # Visits of one stage take equally long.
        visit = action.content is None
        key: tuple[object, ...] = (action.kind, action.stage) if visit else action
        if key not in self._known:
            self._known[key] = self._speeds.seconds(self._work(self._peer, action))
        return self._known[key]


@dataclass(frozen=True)
class _Read:
    plan: Plan
    order: BuildOrder
    work: Callable[[PeerId, Action], Work]


class Orders:
    """Reads the assignments of a world, each once for all of its peers."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Read] = {}
        self._plans: dict[tuple[str, int], Plan] = {}
        """By run and term, the whole plan."""
        self._flow: tuple[Plan | None, Flow | None] = (None, None)

    def planned(self, run: str, term: int, plan: Plan) -> None:
        """The broker tells its peers their slices of this plan."""
        self._plans[run, term] = plan
        self._plans.pop((run, term - _REMEMBERED), None)  # of all runs, however many there are

    def flow(self, run: str, term: int) -> Flow:
        """That of the whole plan."""
        plan = self._plans[run, term]
        if self._flow[0] is not plan or self._flow[1] is None:
            self._flow = plan, Flow(plan, bare_stages(plan), plan.outline.tied)
        assert self._flow[1] is not None
        return self._flow[1]

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
        shares: bool = False,
    ) -> tuple[BuildOrder, ActionTimes]:
        """As `order_from_assign`; `blob` gives a whole blob by its hash, and is asked for all that
        this peer fetches. `shares`: it works by the whole plan, in place of its slice."""
        refs = (assign.full_graph, assign.graph, assign.data, assign.recipe)
        hashes = tuple(ref.hash for ref in refs if ref.hash)
        fetched = {name: blob(name) for name in hashes}
        key = (assign.run, assign.term, *hashes, assign.training)
        whole = self._plans[assign.run, assign.term]
        known = self._known.get(key)
        # Of worlds one after the other the same run and term may have other plans.
        if known is None or (known.plan is not whole and known.plan != whole):
            order = order_from_assign(
                peer, assign, blob=lambda ref: fetched[ref.hash], read=read, shard=shard
            )
            known = self._known[key] = _Read(whole, order, _work(order, whole))
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        begun = known.order.weights
        recipe = begun.recipe if isinstance(begun, Starting) else None
        part = slice_from_proto(PeerId(peer), assign.slice)
        mine = replace(
            known.order,
            peer=PeerId(peer),
            slice=replace(part, plan=whole) if shares else part,
            weights=starting_weights(assign, read, recipe, lambda shard: blob(shard.hash)),
            shard=shard,
            resumed=parts,
        )
        return mine, ActionTimes(known.work, mine.peer, speeds)


def _work(order: BuildOrder, plan: Plan) -> Callable[[PeerId, Action], Work]:
    graph = order.graph.bind(plan.microbatch_size)
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    tied = tied_groups(graph, stages)
    return action_work(
        plan,
        stages,
        {(e.content, e.index): e for e in exchanges_of(plan, stages, tied)},
        Vectors(plan, stages, tied, graph),
        IntervalWork(cost(graph)),
        optimizer_slots=max(1, order.training.train.optimizer_slots),
        halved=halved_of(plan),
    )
