"""Forms replicas: from peers to replicas to pipelines, by memory, speed and links.

1. Divisions of the peers are searched (search.py) by what the event calculation says of each set
   and a closed model of the exchange between them (division.py, rounds.py). Of several forms of the
   request (microbatch sizes) the best one.
2. One is taken: of those with nearly the most samples/s the one without slow links inside and with
   fewest replicas (`preferred`). Rare exchanges nearly always give more samples/s, and a sample
   teaches less the more replicas go their own way: that is not predicted here, so `every` is the
   job's to choose, and what other ways would give stands beside.
3. The planner of the job plans each replica for itself, where that is not too much work; its plan
   is taken where it is the faster one, or the planner is one that the job names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...dag.plan.report import PlanWithReport, Spare
from ...job.words import size_text
from ..base.interface import NoPlan, Planner, PlanRequest
from ..cost.batchings import look_at_forms
from ..cost.candidate import Candidate, from_plan
from ..cost.shortage import refuse_impossible
from ..schedulers.schedulers import plan
from ..search.enough import no_plan
from .beside import (
    alternatives,
    hangs_on,
    left_out,
    one_replica,
    reasons,
    slowest_between,
    slowest_inside,
)
from .copies import MOST_LOOKED_AT
from .division import Division, Judge, preferred
from .formation import Formation, FormedReplica, RoundPrediction
from .gather import gathered
from .pace import Pace, Paces
from .search import best_divisions

__all__ = ["form", "formed_of"]

MOST_PLANNED = 12
"""Replicas that the job's planner plans; of more, the search's own plans are taken."""
MOST_PEERS = 24
"""Peers of such a replica."""


@dataclass(frozen=True, slots=True)
class _Form:
    """What was found in one form of the request."""

    judge: Judge
    divisions: list[Division]

    @property
    def seconds(self) -> float:
        """For a sample, the least."""
        return 1 / self.divisions[0].samples_per_s if self.divisions else float("inf")


def form(
    request: PlanRequest,
    count: int | None,
    every: int,
    bytes_per_parameter: float,
    *,
    overlap: float = 0.0,
    goes_whole: bool = False,
    pause_s: float | None = None,
    planner: Planner = plan,
) -> Formation:
    """The replicas of a run whose rounds are `every` steps of the request's batch. `count`: just so
    many; None: as many as are best. `bytes_per_parameter`: of a contribution, encoded. `overlap`:
    the share of a round's local work beside which the exchange before it may go on. `goes_whole`:
    whether contributions are numbers as they are. `pause_s`: between two sets of snapshots, at
    least; None: none are taken. Raises NoPlan."""
    if every < 1:
        raise NoPlan(f"a round has {every} steps: expected at least 1; raise sync.every", "model")
    refuse_impossible(request)
    if request.beside:
        return _one(request, count, every, bytes_per_parameter, planner)
    looked: list[_Form] = []

    def look(one: PlanRequest) -> float:
        judge = Judge(
            *(Paces(one), every, bytes_per_parameter), overlap=overlap, goes_whole=goes_whole
        )
        may = count is None or (count <= judge.most and judge.allows(count))
        looked.append(_Form(judge, best_divisions(judge, count) if may else []))
        return looked[-1].seconds

    look_at_forms(request, look)
    best = min(looked, key=lambda f: f.seconds)
    if not best.divisions:
        raise _no_division(looked, count)
    judge, divisions = best.judge, best.divisions
    if pause_s is not None and len(request.offers) <= MOST_LOOKED_AT:
        judge = judge.copying(pause_s)
        divisions = [d for found in divisions if (d := judge.of(found.peers)) is not None]
        divisions.sort(key=lambda d: -d.samples_per_s)
    return _formation(judge, preferred(divisions), divisions, count, planner)


def _one(
    request: PlanRequest, count: int | None, every: int, size: float, planner: Planner
) -> Formation:
    """Data stays with its peers: one replica, planned as ever."""
    if count not in (None, 1):
        raise NoPlan(
            f"{count} replicas, and the data of {', '.join(request.local)} stays with the peers "
            "that have it: each would train on its own part of it; use one replica",
            "model",
        )
    made = planner(request)
    one = request.form_of(made.plan)
    judge = Judge(Paces(one), every, size)
    pace = judge.paces.pace(made.step_s, _candidate(judge.paces, made))
    chosen = judge.valued([pace], one.microbatches)
    return _formation(judge, chosen, [chosen], 1, lambda _: made)


def formed_of(
    request: PlanRequest,
    plans: Sequence[PlanWithReport],
    every: int,
    bytes_per_parameter: float,
    why_left_out: str,
) -> Formation:
    """Return replicas that somebody has chosen, each with its plan of a local step. `request`: of
    all offers, with the microbatches of all local steps together. `why_left_out`: what is said of
    offers in no plan. The other arguments are those of `form`."""
    judge = Judge(Paces(request), every, bytes_per_parameter)
    paces = judge.paces
    made = {paces.pace(m.step_s, _candidate(paces, m)): m for m in plans}
    chosen = judge.valued(made, request.microbatches // len(plans))
    inside = {p for m in plans for p in m.plan.peers}
    out = tuple(Spare(o.peer, why_left_out) for o in request.offers if o.peer not in inside)
    return _told(judge, chosen, made, out)


def _formation(
    judge: Judge,
    searched: Division,
    divisions: Sequence[Division],
    count: int | None,
    planner: Planner,
) -> Formation:
    chosen, made = _planned(judge, searched, planner)
    one = one_replica(judge, divisions)
    out = tuple(left_out(judge, searched, chosen, made.values(), count))
    return replace(
        _told(judge, chosen, made, out),
        alternatives=alternatives(judge, chosen, divisions, one),
        reasons=tuple(reasons(judge, chosen, divisions, one, count)),
    )


def _told(
    judge: Judge, chosen: Division, made: Mapping[Pace, PlanWithReport], out: tuple[Spare, ...]
) -> Formation:
    """Return the replicas of a division with their plans, without alternatives and reasons."""
    request, paces = judge.request, judge.paces
    offers, exchange = request.offers, chosen.exchange
    names = [o.peer for o in offers]
    replicas = tuple(
        FormedReplica(
            made[pace].plan.peers,
            made[pace],
            pace.seconds,
            steps,
            chosen.microbatches * request.microbatch_size,
            slowest_inside(paces, pace),
        )
        for pace, steps in zip(chosen.paces, chosen.steps, strict=True)
    )
    prediction = RoundPrediction(
        judge.every,
        judge.batch,
        chosen.local_s,
        exchange.seconds,
        judge.shown(chosen.local_s, exchange.seconds),
        judge.size_bytes,
        tuple((names[p], size) for p, size in exchange.bytes),
        slowest_between(paces, chosen),
        hangs_on(judge, chosen),
    )
    return Formation(replicas, out, prediction, request.microbatch_size, request.head_parts, (), ())


def _planned(
    judge: Judge, chosen: Division, planner: Planner
) -> tuple[Division, dict[Pace, PlanWithReport]]:
    """Return the replicas with the plans that they get, and the plans."""
    own = judge.paces.judge.with_microbatches(chosen.microbatches)
    made: dict[Pace, PlanWithReport] = {}
    named = own.request.options.scheduler != "auto"  # who plans is the job's to say
    few = len(chosen.paces) <= MOST_PLANNED or named
    for pace in chosen.paces:
        found, candidate = own.plan(pace.candidate), pace.candidate
        if few and len(pace.peers) <= MOST_PEERS:
            other = _by_planner(own.request, pace, planner)
            if other is not None and (named or other.step_s < found.step_s):
                found, candidate = other, _candidate(judge.paces, other)
        made[judge.paced(judge.paces.pace(found.step_s, candidate))] = found
    return judge.valued(made, chosen.microbatches), made


def _by_planner(request: PlanRequest, pace: Pace, planner: Planner) -> PlanWithReport | None:
    members = sorted(pace.peers)
    part = replace(
        request,
        offers=tuple(request.offers[p] for p in members),
        links=request.network.part(members),
    )
    try:
        return planner(part)
    except NoPlan:  # the search found one that it does not look for
        return None


def _candidate(paces: Paces, made: PlanWithReport) -> Candidate:
    return from_plan(made.plan, paces.judge.place)


def _no_division(looked: Sequence[_Form], count: int | None) -> NoPlan:
    """Say what is short, in the form with the smallest microbatches."""
    judge = min((f.judge for f in looked), key=lambda j: j.request.microbatch_size)
    paces, wanted = judge.paces, count or 1
    if wanted == 1:
        return no_plan(paces.judge)
    request, offers = judge.request, judge.request.offers
    if wanted > len(offers):
        return NoPlan(f"{wanted} replicas need as many peers, {len(offers)} are on offer", "peers")
    if not judge.allows(wanted):
        return NoPlan(
            f"{wanted} replicas share {request.microbatches} microbatches of a step: expected as "
            "many for each; change plan.replicas or train.microbatch",
            "model",
        )
    offered, needed = int(paces.rooms.sum()), wanted * paces.needed
    each = f"{wanted} replicas hold the model {wanted} times, {size_text(paces.needed)} each"
    if needed > offered:
        return NoPlan(
            f"{each} (parameters, gradients, optimizer state, activations of one microbatch): "
            f"that is {size_text(needed)}, and {len(offers)} peers offer {size_text(offered)}, "
            f"short by {size_text(needed - offered)}; lower plan.replicas, or let more peers join",
            "memory",
            needed - offered,
        )
    single = [frozenset({p}) for p in range(len(offers))]
    most = len(gathered(paces, single))
    return NoPlan(
        f"{each}, and no division of the peers' {size_text(offered)} into {wanted} was found in "
        f"which each has a cut that fits; about {most} find enough memory: lower plan.replicas",
        "memory",
    )
