"""From a run's spec and graph to what a planner gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...dag.cost.network import Network
from ...dag.ir.graph import Graph, GraphError
from ...dag.ir.validate import validate
from ...dag.plan.plan import PeerId
from ...dag.transforms.head import find_head
from ...dag.transforms.vocabulary import can_split, head_operators, split_head
from ...proto.broker_pb2 import RunSpec
from ..base.interface import NoPlan, PeerOffer, PlanRequest
from .batchings import Batching
from .requirements import RunRequirements

__all__ = ["DataThatStays", "data_that_stays", "plan_request"]

HEAD_SHARE = 0.1
"""Splitting the vocabulary head is tried when it has at least this share of the work: a smaller
one fits into a stage without unbalancing it."""
HEAD_MORE = 1.25
"""Work of a head in blocks over that of the whole, at most: softmax and loss in plain operators."""
HEAD_PARTS = (2, 4)


class DataThatStays(NamedTuple):
    """local: inputs of a run's model. holders: offers that have their data. blended: as in
    PlanRequest."""

    local: tuple[str, ...]
    holders: frozenset[PeerId]
    blended: bool


def data_that_stays(spec: RunSpec, graph: Graph, offers: Sequence[PeerOffer]) -> DataThatStays:
    """Return the inputs of a run's model whose data stays with its peers. The peers' word counts
    beside that of the spec, which a submitter may have made up."""
    kept = {o.peer: names for o in offers if (names := o.keeps(spec.data.hash)) is not None}
    named = dict.fromkeys((*spec.local, *(name for names in kept.values() for name in names)))
    local = tuple(i.name for i in graph.inputs if i.name in named)
    blended = all(spec.data.hash in o.blended for o in offers if o.peer in kept)
    holders = frozenset(kept) if local else frozenset[PeerId]()
    return DataThatStays(local, holders, blended and bool(holders))


def plan_request(
    spec: RunSpec,
    wish: RunRequirements,
    graph: Graph,
    offers: Sequence[PeerOffer],
    network: Network | None,
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
    local, holders, blended = data_that_stays(spec, graph, offers)
    if local and not holders:
        raise NoPlan(f"no peer on offer has the data {wish.data}, which stays where it is", "peers")

    options = wish.options
    if offers and all(o.accelerator for o in offers):
        options = replace(options, round_bytes=0, exchange_bytes=0)

    def with_batching(batching: Batching) -> PlanRequest:
        size, microbatches, evaluation = batching
        return PlanRequest(
            graph.bind(size),
            tuple(offers),
            microbatches,
            size,
            evaluation,
            options,
            network,
            local=local,
            holders=holders,
            blended=blended,
        )

    first = with_batching(wish.batchings[0])
    choices = wish.batchings[1:] if graph.batch is None else ()
    others = [with_batching(b) for b in choices]
    # It finds the costs: the answer shares them. Of replicas that meet, all have one head.
    split = [] if wish.has_rounds else _split(first)
    return replace(first, known_costs=first.costs, others=(*others, *split))


def _split(request: PlanRequest) -> list[PlanRequest]:
    """The request with the vocabulary head in blocks, where that could pay."""
    graph = request.graph
    # The split form exists for the full operator set only.
    if len(request.offers) < 2 or any(o.operator_set == "core" for o in request.offers):
        return []
    if request.options.whole_parameters or can_split(graph) or not _is_worth_splitting(request):
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
        if parts * block < HEAD_SHARE * total and not _is_too_large(request):
            break
        found.append(split)
    return found


def _is_worth_splitting(request: PlanRequest) -> bool:
    """Whether the head could have its share of the work in blocks, which take a little more than
    the whole: told without finding the costs of a graph that is split."""
    graph, costs = request.graph, request.costs
    head = find_head(graph)
    gone = head.gone | {head.loss.name}
    total = sum(c.forward.flops + c.backward.flops for c in costs)
    share = sum(
        c.forward.flops + c.backward.flops
        for op, c in zip(graph.operators, costs, strict=True)
        if op.name in gone
    )
    return HEAD_MORE * share >= HEAD_SHARE * total or _is_too_large(request)


def _is_too_large(request: PlanRequest) -> bool:
    """Whether the head's matrix, with its gradient and optimizer state, is more than most peers
    have memory for."""
    graph = request.graph
    name, _ = find_head(graph).weights[0]
    trainable = any(p.name == name and p.trainable for p in graph.parameters)
    spec = graph.spec[f"param:{name}"]
    size = spec.size_bytes
    if trainable:
        size += spec.size_bytes + request.options.standing_bytes * spec.elements
    small = sum(o.device_memory_bytes < size for o in request.offers)
    return 2 * small > len(request.offers)
