"""From a run's spec and graph to what a planner gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..dag.graph import Graph, GraphError
from ..dag.network import Network
from ..dag.validate import validate
from ..dag.vocabulary import can_split, head_operators, split_head
from ..proto.broker_pb2 import RunSpec
from .scheduler.interface import NoPlan, PeerOffer, PlanRequest
from .wish import Batching, Wish

__all__ = ["plan_request"]

HEAD_SHARE = 0.1
"""Splitting the vocabulary head is tried when it has at least this share of the work: a smaller
one fits into a stage without unbalancing it."""
HEAD_PARTS = (2, 4)


def plan_request(
    spec: RunSpec, wish: Wish, graph: Graph, offers: Sequence[PeerOffer], network: Network | None
) -> PlanRequest:
    """The request with the run's default batching; its `others` are the other batchings, and the
    graph with its head split. Raises GraphError, and NoPlan where nobody has the run's data."""
    if graph.operator_set != "full":
        raise GraphError(f"its operator set is {graph.operator_set}: expected the full form")
    if graph.batch not in (None, spec.microbatch_size):
        raise GraphError(
            f"it is bound to microbatches of {graph.batch}, the run has {spec.microbatch_size}"
        )
    validate(graph)
    local = tuple(name for name in wish.local if any(i.name == name for i in graph.inputs))
    holders = frozenset(o.peer for o in offers if spec.data.hash in o.manifests)
    if local and not holders:
        raise NoPlan(f"no peer on offer has the data {wish.data}, which stays where it is", "peers")

    def with_batching(batching: Batching) -> PlanRequest:
        size, microbatches, evaluation = batching
        return PlanRequest(
            graph.bind(size),
            tuple(offers),
            microbatches,
            size,
            evaluation,
            wish.options,
            network,
            local=local,
            holders=holders if local else frozenset(),
        )

    first = with_batching(wish.batchings[0])
    choices = wish.batchings[1:] if graph.batch is None else ()
    others = [with_batching(b) for b in choices]
    split = _split(first)  # finds the costs: the answer shares them
    return replace(first, known_costs=first.costs, others=(*others, *split))


def _split(request: PlanRequest) -> list[PlanRequest]:
    """The request with the vocabulary head in blocks, where that could pay."""
    graph = request.graph
    # The split form exists for the full operator set only.
    if len(request.offers) < 2 or any(o.operator_set == "core" for o in request.offers):
        return []
    if can_split(graph):
        return []
    total = sum(c.forward.flops + c.backward.flops for c in request.costs)
    found = []
    for parts in HEAD_PARTS:
        try:
            form = split_head(graph, parts)
        except GraphError:  # fewer words than parts
            break
        split = replace(request, graph=form, head_parts=parts)
        start, stop = head_operators(graph, parts)[0]
        block = sum(c.forward.flops + c.backward.flops for c in split.costs[start:stop])
        if parts * block < HEAD_SHARE * total:
            break
        found.append(split)
    return found
