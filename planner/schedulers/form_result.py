"""What `auto` found in a form of a request, made as deep as its links want it, and a plan with its
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...dag.plan.plan import ScheduleName
from ...dag.plan.report import Alternative, PlanWithReport
from ...dag.schedule.orders.schedules import first_of, may_list
from ...job.words import count_of
from ..base.interface import NoPlan, PlanRequest
from ..cost.candidate import Candidate
from ..cost.cost_model import CostModel
from ..search.deep import deep_starts
from ..search.depth import Deepened, deepened, listed_with
from ..search.moves import joined
from ..search.reasons import spare_reasons, stage_reasons
from ..search.search import SearchResult, SearchSpace
from .alternatives import alone, replicas

__all__ = ["FormResult", "deepest", "planned"]

MOST_JUDGED = 4
"""Depths of a candidate and a schedule that are judged before the best is known."""
DEEP = 2.0
"""Of the best step's time, up to which the best of another shape is tried with more microbatches on
their way."""


@dataclass(frozen=True, slots=True)
class FormResult:
    """The best that was found in one form of the request, and the best of each shape beside it."""

    judge: CostModel
    best: SearchResult | None
    shapes: dict[tuple[int, ScheduleName], SearchResult]


def deepest(
    chosen: FormResult, space: SearchSpace | None = None
) -> tuple[FormResult, Deepened | None]:
    """The best of what was found, and of the best of each shape, with as many microbatches on their
    way as make its step shortest, or as are asked for. Raises NoPlan where memory allows no so
    many."""
    best, judge = chosen.best, chosen.judge
    assert best is not None
    options = judge.request.options
    if not may_list(options.schedule):
        return chosen, None
    most = DEEP if options.in_flight is None else float("inf")
    others = [
        f.candidate for f in chosen.shapes.values() if f.fits and f.seconds < most * best.seconds
    ]
    candidates = list(dict.fromkeys((best.candidate, *others)))
    if space is not None:
        found = deep_starts(judge, space, candidates)
        candidates = list(dict.fromkeys((*candidates, *found)))
    deep = deepened(judge, candidates[0], MOST_JUDGED)
    for candidate in candidates[1:]:
        another = deepened(judge, candidate, MOST_JUDGED, deep.seconds)
        deep = min(deep, another, key=lambda d: d.seconds)
    if deep.candidate.visits and options.in_flight is None:  # what memory buys of the best
        deep = min(deepened(judge, _textbook(deep.candidate)), deep, key=lambda d: d.seconds)
    if deep.seconds == float("inf"):
        raise _no_room(judge) if options.in_flight is None else _too_deep(judge, candidates)
    return replace(chosen, best=SearchResult(deep.candidate, (best.key[0], deep.seconds))), deep


def _no_room(judge: CostModel) -> NoPlan:
    """Why none of them has its gradients of weights apart."""
    return NoPlan(
        f'plan.schedule is "{judge.request.options.schedule}", and of the plans that were found '
        f"for microbatches of {judge.request.microbatch_size} none has memory for one whose "
        'gradients of weights wait: expected schedule = "auto" or "listed", or a lower '
        "train.microbatch",
        "memory",
    )


def _too_deep(judge: CostModel, candidates: Sequence[Candidate]) -> NoPlan:
    """Why none of them keeps as many microbatches as are asked for."""
    asked = judge.request.options.in_flight
    low, high = 0, (asked or 1) - 1  # the most that some candidate has memory for
    while low < high:
        middle = (low + high + 1) // 2
        fits = any(listed_with(judge, c, middle).seconds < float("inf") for c in candidates)
        low, high = (middle, high) if fits else (low, middle - 1)
    return NoPlan(
        f"plan.in_flight is {asked}, and of the plans that were found for microbatches of "
        f"{judge.request.microbatch_size} none has memory for more than {low} at once: lower "
        "plan.in_flight or train.microbatch, or leave the number to the planner",
        "memory",
    )


def planned(
    chosen: FormResult,
    others: Mapping[str, float],
    forms: Sequence[FormResult],
    deep: Deepened | None = None,
) -> PlanWithReport:
    """The plan of what was chosen. `others`: seconds of other planners by name; `forms`: what was
    found in other forms of the request; `deep`: what depths were tried."""
    judge, best = chosen.judge, chosen.best
    assert best is not None
    seconds = best.seconds
    alternatives = [
        Alternative(name, s, f"{s:.4g} s, {s / seconds:.2f} times this plan's")
        for name, s in others.items()
    ]
    alternatives += [alone(judge), replicas(judge)]
    return judge.plan(
        best.candidate,
        reasons=_reasons(chosen, forms, others, deep),
        spares=spare_reasons(judge, _textbook(best.candidate), seconds),
        alternatives=alternatives,
    )


def _divided(request: PlanRequest) -> str:
    return f"{count_of(request.microbatches, 'microbatch')} of {request.microbatch_size}"


def _textbook(candidate: Candidate) -> Candidate:
    """Return it under the schedule that is listed without times."""
    return replace(candidate, schedule=first_of(candidate.schedule), visits=())


def _reasons(
    chosen: FormResult,
    forms: Sequence[FormResult],
    others: Mapping[str, float],
    deep: Deepened | None,
) -> list[str]:
    judge, best = chosen.judge, chosen.best
    assert best is not None
    candidate, seconds = _textbook(best.candidate), best.seconds
    used, all_peers = len(candidate.peers), len(judge.offers)
    count = len(candidate.pipelines)
    text = (
        f"auto: {used} of {all_peers} peers in {count_of(count, 'pipeline')} under "
        f"{best.candidate.schedule}, {seconds:.4g} s for a step of "
        f"{_divided(judge.request)}"
    )
    found = [text]
    for what, rest in (
        ("pipelines", [f for (n, _), f in chosen.shapes.items() if n != count]),
        ("schedule", [f for (_, s), f in chosen.shapes.items() if s != candidate.schedule]),
    ):
        rest = [f for f in rest if f.fits and f.seconds > seconds * 1.0001]
        if rest:
            next_best = min(rest, key=lambda f: f.key)
            n, s = len(next_best.candidate.pipelines), next_best.candidate.schedule
            other = count_of(n, "pipeline") if what == "pipelines" else s
            found.append(
                f"{what}: the best with {other} that was found takes {next_best.seconds:.4g} s, "
                f"{next_best.seconds - seconds:.3g} s more"
            )
    if deep is not None and deep.candidate.visits:
        depths = ", ".join(f"{most} at once {s:.4g} s" for most, s in deep.tried)
        found.append(
            "visits are listed with the times of peers and links, by the most microbatches that a "
            f"peer keeps: {depths}; under {candidate.schedule} the step takes "
            f"{judge.seconds(candidate):.4g} s"
        )
    if deep is not None and deep.undivided_s < float("inf"):
        found.append(
            "gradients of weights are computed where a peer would wait for others: with backwards "
            f"as a whole the step takes {deep.undivided_s:.4g} s"
        )
    again = [s for p in candidate.pipelines for s in p if s.recompute]
    if again and judge.request.options.recompute is None:
        without = judge.seconds(candidate.recomputing(False))
        found.append(
            f"{len(again)} shares compute their forward again: "
            + (
                "without it the plan does not fit the peers' memory"
                if without == float("inf")
                else f"without it the step takes {without:.4g} s"
            )
        )
    whole = replace(candidate, pipelines=tuple(joined(p) for p in candidate.pipelines))
    if whole != candidate:
        found.append(
            "what a peer holds is cut so that it gives gradients of its end while its beginning "
            f"does its backward: whole the step takes {judge.seconds(whole):.4g} s"
        )
    for form in forms:
        other_best = form.best
        if other_best is not None and other_best.fits:
            r = form.judge.request
            split = f" and the head in {r.head_parts} parts" if r.head_parts else ""
            found.append(f"{_divided(r)}{split} would take {other_best.seconds:.4g} s")
    if others:
        name = min(others, key=lambda n: others[n])
        found.append(
            f"the best other planner is {name} with {others[name]:.4g} s, "
            f"{others[name] - seconds:.3g} s more"
        )
    found += stage_reasons(judge, candidate)
    return found
