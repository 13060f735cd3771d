"""What planners say when something is short, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

from .interface import NoPlan, PeerOffer, PlanRequest
from .partition import Chain

__all__ = ["refuse_impossible", "shortage", "size_text"]


def refuse_impossible(request: PlanRequest) -> None:
    """Raises NoPlan where no choice of peers and cuts could do what the options ask for."""
    graph, options = request.graph, request.options
    pipelines = options.pipelines or 1
    if pipelines > request.microbatches:
        raise NoPlan(
            f"{pipelines} pipelines share {request.microbatches} microbatches of a step: expected "
            "at least one for each; lower plan.pipelines or train.microbatch",
            "model",
        )
    if options.stages is not None and options.stages > len(graph.operators):
        raise NoPlan(
            f"{options.stages} stages for a graph of {len(graph.operators)} operators: every stage "
            "needs at least one; lower plan.stages",
            "model",
        )
    need = (options.stages or 1) * pipelines
    if options.schedule == "interleaved" and options.stages is not None:
        need = pipelines  # a peer may hold several
    if len(request.offers) < need:
        raise NoPlan(f"{need} peers are needed, {len(request.offers)} are on offer", "peers")


def shortage(request: PlanRequest, chain: Chain, rooms: Sequence[int], live: int) -> str:
    """Which memory is short. `rooms`: bytes of the stages of the last try; `live`: the most
    microbatches that one of them kept."""
    offers = request.offers
    largest = max(o.device_memory_bytes for o in offers)
    worst, needed = chain.largest_operator()
    if needed > largest:
        op = request.graph.operators[worst]
        of = f" of {op.module}" if op.module else ""
        return (
            f"no peer has enough memory for operator {op.name}{of}: it needs {size_text(needed)} "
            f"(parameters, gradients, optimizer state, one microbatch), the largest peer offers "
            f"{size_text(largest)}, short by {size_text(needed - largest)}"
        )
    whole, offered = chain.device_bytes(0, chain.operators, 1), sum(rooms)
    stages = f"{len(rooms)} stage{'s offer' if len(rooms) != 1 else ' offers'}"
    if whole > offered:
        return (
            f"the model needs {size_text(whole)} for one microbatch (parameters, gradients, "
            f"optimizer state, activations), the {stages} {size_text(offered)}, short by "
            f"{size_text(whole - offered)}: let more peers join, or offer more memory"
        )
    return (
        f"no cut into {len(rooms)} stages fits: the peers offer {_memories(offers)}, and the model "
        f"needs {size_text(whole)} with one live microbatch and more with up to {live}: lower "
        "train.microbatch, let more peers join, or offer more memory"
    )


def _memories(offers: Sequence[PeerOffer], most: int = 8) -> str:
    named = ", ".join(f"{o} {size_text(o.device_memory_bytes)}" for o in offers[:most])
    return named + (f" and {len(offers) - most} more" if len(offers) > most else "")


def size_text(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
