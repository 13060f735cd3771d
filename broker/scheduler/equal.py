"""The first planner: equal FLOPs over the peers in the order in which they joined.

It knows no links and no speeds: every stage gets the same FLOPs, as far as operators can be divided
and memory allows. What it measures itself against is written in `partition.py`. Which peers:

- `stages = N`: the first N peers (N · pipelines of them) that are enough; if these have too little
  memory, those with the most memory;
- `auto`: all peers. While no cut fits, or there are more peers than operators, the peer with the
  least memory becomes a spare.

With `pipelines = P` the peers form P rows of as many stages; row p runs microbatches p, p+P, ….
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...dag.cost import cost
from ...dag.plan import (
    PeerPrediction,
    Plan,
    Prediction,
    Route,
    ScheduleName,
    Spare,
    StageSlot,
    Visit,
)
from .interface import NoPlan, PeerOffer, PlanRequest
from .partition import SLACK, Chain, Room

__all__ = ["equal_flops"]


@dataclass(frozen=True, slots=True)
class _Grid:
    """The chosen peers: rows[p][k] holds stage k in pipeline p."""

    rows: tuple[tuple[PeerOffer, ...], ...]

    @classmethod
    def of(cls, peers: Sequence[PeerOffer], pipelines: int) -> _Grid:
        stages = len(peers) // pipelines
        return cls(tuple(tuple(peers[p * stages : (p + 1) * stages]) for p in range(pipelines)))

    @property
    def stages(self) -> int:
        return len(self.rows[0])

    def holders(self, stage: int) -> tuple[PeerOffer, ...]:
        return tuple(row[stage] for row in self.rows)


def equal_flops(request: PlanRequest) -> Plan:
    """Raises NoPlan."""
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
    if len(request.offers) < need:
        raise NoPlan(f"{need} peers are needed, {len(request.offers)} are on offer", "peers")
    copies = 1 + options.optimizer_slots + (pipelines > 1)
    chain = Chain(graph, cost(graph), copies)
    spares: list[Spare] = []
    last: _Grid | None = None
    for grid, spares in _candidates(request, chain.operators):
        last = grid
        rooms = _rooms(request, grid)
        if chain.fits(rooms):
            bounds = chain.cut(rooms)
            assert bounds is not None, "what fits can be cut"
            return _plan(request, chain, grid, bounds, spares)
    assert last is not None, "there is at least one candidate"
    raise NoPlan(_shortage(request, chain, last), "memory")


def _candidates(request: PlanRequest, operators: int) -> Iterator[tuple[_Grid, list[Spare]]]:
    """Grids of peers with the spares that they leave, the best first."""
    offers, options = request.offers, request.options
    pipelines = options.pipelines or 1
    if options.stages is not None:
        size = options.stages * pipelines
        by_memory = sorted(offers, key=lambda o: -o.device_memory_bytes)[:size]
        for chosen in (offers[:size], tuple(o for o in offers if o in by_memory)):
            why = f"the job asks for {options.stages} stages"
            why += f" in {pipelines} pipelines" if pipelines > 1 else ""
            yield (
                _Grid.of(chosen, pipelines),
                [Spare(o.peer, why) for o in offers if o not in chosen],
            )
        return
    left = list(offers)
    spares: list[Spare] = []
    while len(left) >= pipelines:
        stages = len(left) // pipelines
        if stages <= operators:
            odd = left[stages * pipelines :]
            why = f"{len(left)} peers do not divide into {pipelines} pipelines"
            yield (
                _Grid.of(left[: stages * pipelines], pipelines),
                spares + [Spare(o.peer, why) for o in odd],
            )
        # The later one of equals goes, so that who joined first stays.
        least = min(reversed(left), key=lambda o: o.device_memory_bytes)
        left.remove(least)
        why = (
            f"more peers ({len(offers)}) than operators ({operators})"
            if stages > operators
            else f"its memory ({_size(least.device_memory_bytes)}) is the least and too small for "
            "a stage beside the others"
        )
        spares = [*spares, Spare(least.peer, why)]


def _schedule(request: PlanRequest) -> ScheduleName:
    return "1f1b" if request.options.schedule == "auto" else request.options.schedule


def _live(request: PlanRequest, stage: int, stages: int) -> int:
    """Microbatches of one pipeline between their forward and their backward in a stage."""
    each = -(-request.microbatches // (request.options.pipelines or 1))
    return each if _schedule(request) == "gpipe" else min(each, stages - stage)


def _rooms(request: PlanRequest, grid: _Grid) -> list[Room]:
    return [
        Room(
            min(o.device_memory_bytes for o in grid.holders(k)),
            _live(request, k, grid.stages),
        )
        for k in range(grid.stages)
    ]


def _plan(
    request: PlanRequest,
    chain: Chain,
    grid: _Grid,
    bounds: Sequence[tuple[int, int]],
    spares: Sequence[Spare],
) -> Plan:
    stages = grid.stages
    predicted: list[PeerPrediction] = []
    slowest = 0.0
    for k, (start, stop) in enumerate(bounds):
        live = _live(request, k, stages)
        edge = chain.crossing_bytes(start) + chain.crossing_bytes(stop)
        for holder in grid.holders(k):
            per = chain.flops(start, stop) / holder.flops_per_s if holder.flops_per_s else 0.0
            slowest = max(slowest, per)
            each = -(-request.microbatches // (request.options.pipelines or 1))
            predicted.append(
                PeerPrediction(
                    holder.peer,
                    compute_s=per * each,
                    device_bytes=chain.device_bytes(start, stop, live),
                    host_bytes=2 * edge * live,
                )
            )
    known = all(o.flops_per_s for row in grid.rows for o in row)
    each = -(-request.microbatches // (request.options.pipelines or 1))
    return Plan(
        stages=tuple(
            StageSlot(start, stop, tuple(o.peer for o in grid.holders(k)))
            for k, (start, stop) in enumerate(bounds)
        ),
        routes=_routes(grid, request.microbatches),
        microbatch_size=request.microbatch_size,
        schedule=_schedule(request),
        # The pipe fills with one microbatch per stage, then its slowest stage sets the pace.
        predicted=Prediction((each + stages - 1) * slowest if known else 0.0, tuple(predicted)),
        reasons=tuple(_reasons(request, chain, grid, bounds)),
        spares=tuple(spares),
        evaluation_routes=_routes(grid, request.evaluation_microbatches),
    )


def _routes(grid: _Grid, microbatches: int) -> tuple[Route, ...]:
    rows = [tuple(Visit(k, o.peer) for k, o in enumerate(row)) for row in grid.rows]
    return tuple(rows[m % len(rows)] for m in range(microbatches))


def _reasons(
    request: PlanRequest, chain: Chain, grid: _Grid, bounds: Sequence[tuple[int, int]]
) -> Iterator[str]:
    total = chain.flops(0, chain.operators)
    shares = [chain.flops(*b) / total if total else 1.0 for b in bounds]
    yield (
        f"equal FLOPs: {grid.stages} stage{'s' if grid.stages > 1 else ''} over the peers in the "
        f"order of joining, the largest with {max(shares):.1%} of the FLOPs (ideal "
        f"{1 / grid.stages:.1%}); within {SLACK:.0%} of the best cut, the one with the fewest "
        "bytes across"
    )
    for k, (start, stop) in enumerate(bounds):
        ops = request.graph.operators
        needed = chain.device_bytes(start, stop, _live(request, k, grid.stages))
        yield (
            f"stage {k} [{start}, {stop}) from {ops[start].name} to {ops[stop - 1].name} on "
            f"{' + '.join(map(str, grid.holders(k)))}: {shares[k]:.1%} of the FLOPs, "
            f"{_size(needed)} of memory"
        )


def _shortage(request: PlanRequest, chain: Chain, grid: _Grid) -> str:
    """What is short, and by how much, for the last grid that was tried."""
    offers = request.offers
    largest = max(o.device_memory_bytes for o in offers)
    worst, needed = chain.largest_operator()
    if needed > largest:
        op = request.graph.operators[worst]
        of = f" of {op.module}" if op.module else ""
        return (
            f"no peer has enough memory for operator {op.name}{of}: it needs {_size(needed)} "
            f"(parameters, gradients, optimizer state, one microbatch), the largest peer offers "
            f"{_size(largest)}, short by {_size(needed - largest)}"
        )
    rooms = _rooms(request, grid)
    whole = chain.device_bytes(0, chain.operators, 1)
    offered = sum(room.bytes for room in rooms)
    if whole > offered:
        return (
            f"the model needs {_size(whole)} for one microbatch (parameters, gradients, optimizer "
            f"state, activations), the {grid.stages} stages offer {_size(offered)}, short by "
            f"{_size(whole - offered)}: let more peers join, or offer more memory"
        )
    return (
        f"no cut into {grid.stages} stages fits: the peers offer "
        f"{', '.join(f'{o} {_size(o.device_memory_bytes)}' for o in offers[:8])}, and the model "
        f"needs {_size(whole)} with one live microbatch and more with up to {rooms[0].live}: lower "
        "train.microbatch, let more peers join, or offer more memory"
    )


def _size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
