"""Ours: chooses the peers, their order, the cuts, the number of pipelines and who is in which, the
microbatches of each and their size, the schedule, and where to recompute.

1. Seeds (planner/search/seeds.py) and the plans of all other planners are bounded, each
   with the best peers that one batch finds for its places.
2. The best of each shape (number of pipelines, schedule, form of the request) is improved by local
   search (planner/search/search.py, planner/search/moves.py), the best of all
   further than the rest.
3. What is left of the budget goes into restarts from shaken copies of the best.

Everything is judged by the same event calculation, so the result is never worse than another
planner's. Budgets count work: about 1 s on small cases, some seconds on the largest.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ...dag.plan.plan import ScheduleName
from ...dag.plan.report import PlanWithReport
from ...dag.schedule.orders.schedules import SEARCHED, first_of, interleaves
from ..base.interface import NoPlan, Planner, PlanRequest
from ..baselines.baselines import equal_compute, uniform
from ..baselines.op_fence import Fenced, fenced, op_fence
from ..cost.batchings import look_at_forms
from ..cost.candidate import Candidate, from_plan, to_plan
from ..cost.cost_model import CostModel
from ..cost.rows import RowBuilder
from ..cost.shortage import fitting, refuse_impossible
from ..search.beside import no_plan_beside, seeds_beside
from ..search.collectives import with_collectives
from ..search.enough import no_plan
from ..search.moves import all_moves, exchange_moves
from ..search.parallel import candidates_in
from ..search.reasons import with_peer
from ..search.search import Search, SearchResult, SearchSpace, weight
from ..search.seeds import Seeds
from ..search.sparsity import with_ratios
from .form_result import FormResult, deepest, planned

__all__ = ["BASELINES", "BUDGET", "auto", "choose", "space_of"]

BASELINES: dict[str, Planner] = {
    "uniform": uniform,
    "equal-compute": equal_compute,
    "op-fence": op_fence,
}
"""The planners that it is compared with, and begins from."""
BUDGET = 60_000
"""Work of the search on a small request (see planner/search/search.py); half a second to a
second."""
BUDGET_LARGE = 250_000
"""Work of the search on the largest ones, where a structure costs more than its actions."""
MOST_VISITS = 6_000
"""Visits of a step up to which the baselines that use every peer are predicted beside ours."""
STARTS = 4
"""Seeds that are improved, at most one of each shape before a second of any."""
RESTARTS = 6
MOST_SEEDED = 256
"""Peers up to which the search has seeds of its own; beyond, those of `op-fence` are improved."""
MOST_GROUPED = 24
"""Peers up to which groupings are searched here; beyond, it takes longer than all the rest."""
NEAR = 1.3
"""Forms of the request whose best by `op-fence` is at most so many times the least are searched."""
GROUPED = 8
"""Candidates from planner/search/parallel.py, its best guesses."""
WORTH = 0.99
"""Of a step's time, what it must come to where shares are cut for the sake of an exchange."""


def space_of(request: PlanRequest) -> SearchSpace:
    """What the options leave open."""
    options = request.options
    return SearchSpace(
        pipelines=options.pipelines,
        stages=options.stages,
        schedules=SEARCHED if options.schedule == "auto" else (first_of(options.schedule),),
        recompute=(False, True) if options.recompute is None else (options.recompute,),
        # Who has the data may take both ends.
        repeats=options.stages is None or interleaves(options.schedule) or bool(request.beside),
    )


def auto(request: PlanRequest) -> PlanWithReport:
    """Raises NoPlan with what is short and the smallest change that was found to help."""
    refuse_impossible(request)
    looked: list[tuple[CostModel, Fenced | None]] = []

    def look(form: PlanRequest) -> float:
        # Each form by itself, with its costs found once.
        judge = CostModel(replace(form, others=(), known_costs=form.costs))
        looked.append((judge, fenced(judge)))
        return _seconds_of(looked[-1][1])

    look_at_forms(request, look)
    least = min(_seconds_of(fence) for _, fence in looked)
    found: list[tuple[FormResult, dict[str, float]]] = []
    for judge, fence in looked:
        if least < _seconds_of(fence) > NEAR * least:
            # Far behind: what `op-fence` found is all that is said of it.
            only = None if fence is None else SearchResult(fence.candidate, (0.0, fence.seconds))
            found.append((FormResult(judge, only, {}), {}))
            continue
        others = _others(judge, fence)
        starts = {candidate: s for candidate, s in others.values()}
        # The first look at every form is short; the best one is looked at again.
        budget = BUDGET if len(looked) == 1 else BUDGET // 3
        chosen = choose(judge, space_of(judge.request), budget=budget, starts=starts)
        seconds = {name: s for name, (_, s) in others.items()}
        found.append((chosen, seconds))
    fitting = [x for x in found if x[0].best is not None and x[0].best.fits]
    if not fitting:
        # What is short with the smallest microbatches is short with all.
        judge = min((j for j, _ in looked), key=lambda j: j.request.microbatch_size)
        raise no_plan_beside(judge) or no_plan(judge)
    fitting.sort(key=lambda x: x[0].best.seconds if x[0].best else float("inf"))
    chosen, seconds = fitting[0]
    assert chosen.best is not None
    if len(looked) > 1:
        again = choose(
            chosen.judge,
            space_of(chosen.judge.request),
            starts={chosen.best.candidate: chosen.best.seconds},
        )
        if again.best is not None and again.best.seconds < chosen.best.seconds:
            chosen = again
    forms = [(chosen, seconds), *fitting[1:]]
    too_deep: NoPlan | None = None
    for at, (form, seconds) in enumerate(forms):
        try:
            best, deep = deepest(_with_collectives(_overlapped(form)), space_of(form.judge.request))
        except NoPlan as error:  # smaller microbatches may have room for as many in flight
            too_deep = too_deep or error
            continue
        return planned(best, seconds, [x[0] for x in forms[:at] + forms[at + 1 :]], deep)
    assert too_deep is not None, "there is at least one form"
    raise too_deep


def _overlapped(chosen: FormResult) -> FormResult:
    """What peers hold is cut where gradients are given earlier for it, if that gains anything to
    speak of."""
    best, judge = chosen.best, chosen.judge
    assert best is not None
    search = Search(judge, space_of(judge.request), BUDGET)
    search.tell(best.candidate, best.seconds)
    found = search.improve(best.candidate, exchange_moves)
    return replace(chosen, best=found) if found.seconds < WORTH * best.seconds else chosen


def _with_collectives(chosen: FormResult) -> FormResult:
    best, judge = chosen.best, chosen.judge
    assert best is not None
    found = with_ratios(judge, with_collectives(judge, best.candidate))
    if found == best.candidate:
        return chosen
    return replace(chosen, best=SearchResult(found, (best.key[0], judge.seconds(found))))


def _seconds_of(fence: Fenced | None) -> float:
    return float("inf") if fence is None else fence.seconds


def choose(
    judge: CostModel,
    space: SearchSpace,
    *,
    budget: int | None = None,
    starts: Mapping[Candidate, float] | None = None,
    seed: int = 0,
) -> FormResult:
    """The search of `auto` over one form of a request. `starts`: candidates that fit and
    that it must not be worse than, with their seconds by the same judge."""
    large = judge.operators > 256 or len(judge.offers) > 32
    search = Search(judge, space, budget or (BUDGET_LARGE if large else BUDGET))
    best: SearchResult | None = None
    shapes: dict[tuple[int, ScheduleName], SearchResult] = {}

    def note(found: SearchResult) -> None:
        nonlocal best
        shape = _shape(found.candidate)
        if shape not in shapes or found.key < shapes[shape].key:
            shapes[shape] = found
        if best is None or found.key < best.key:
            best = found

    ranked: list[tuple[tuple[float, float], int, Candidate]] = []
    given = [c for c in starts or {} if search.in_space(c)]
    for candidate in given:
        search.tell(candidate, (starts or {})[candidate])
        note(SearchResult(candidate, search.key(candidate)))
    # Groups of several peers are found by a search of their own.
    few = len(judge.offers) <= MOST_GROUPED
    open_to_all = few and space.pipelines != 1 and not judge.request.beside
    several = candidates_in(judge) if open_to_all else iter(())
    grouped = [guess.candidate for guess, _ in zip(several, range(GROUPED), strict=False)]
    known = len(judge.offers) > MOST_SEEDED and given
    own = () if known else Seeds(judge, space).all()
    if judge.request.beside:
        own = seeds_beside(judge, space)
    seeds = dict.fromkeys((*given, *grouped, *own))
    for n, candidate in enumerate(_promising(judge, seeds, search.budget // 3)):
        # A request too large for its budget still gets a few.
        if n >= 4 and search.spent > search.budget // 2:
            break
        if weight(judge, candidate) > search.budget // 4:
            continue
        if search.allows(candidate):
            one = search.assigned(candidate)
            ranked.append((search.bound(one), len(ranked), one))
    ranked.sort(key=lambda x: x[:2])
    begin: dict[Candidate, None] = {}
    kinds = ((_shape, STARTS), (_is_closed, STARTS + 1), (_size, STARTS + 3))
    for shape_of, most in kinds:
        seen = {shape_of(c) for c in begin}
        for _, _, candidate in ranked:
            if len(begin) < most and shape_of(candidate) not in seen:
                seen.add(shape_of(candidate))
                begin[candidate] = None
    # Shapes that begin far behind get one round; the budget is for the best.
    total = search.budget
    for n, candidate in enumerate(begin):
        if not search.open:
            break
        search.budget = search.spent + max(1, (total - search.spent) // max(2, len(begin) - n))
        note(search.improve(candidate, all_moves))
        search.budget = total
    if best is None or not best.fits:
        for found in _tightest(search):
            note(found)
    rng = random.Random(seed)
    for _ in range(RESTARTS):
        if best is None or not search.open:
            break
        start = _shaken(best.candidate, rng, len(judge.offers))
        if search.allows(start):
            note(search.improve(search.assigned(start), all_moves, rounds=12))
    if best is not None and best.fits:
        note(_with_spares(search, best))
    return FormResult(judge, best, shapes)


def _tightest(search: Search) -> Iterator[SearchResult]:
    """Where memory is so short that no seed led to a plan: the peers with most of it in a row, each
    filled as far as it goes (planner/cost/shortage.py), whatever the links; improved with
    a budget of its own.
    """
    judge = search.judge
    rooms = [o.device_memory_bytes for o in judge.offers]
    for again in search.space.recompute:
        candidate = fitting(judge, rooms, again)
        if candidate is not None and search.allows(candidate):
            search.budget = max(search.budget, search.spent) + BUDGET
            yield search.improve(candidate, all_moves)
            return


def _promising(judge: CostModel, seeds: Iterable[Candidate], room: int) -> list[Candidate]:
    """All of them where they are cheap; otherwise the best of each shape by a closed formula, then
    the second best of each, and so on, as far as the budget has room."""
    every = list(seeds)
    if sum(4 * weight(judge, c) for c in every) <= 3 * room:
        return every
    shapes: dict[tuple[int, ScheduleName], int] = {}
    ranks, rows = [], RowBuilder(judge)
    for value, n in sorted((rows.seconds(c), n) for n, c in enumerate(every)):
        rank = shapes.get(_shape(every[n]), 0)
        shapes[_shape(every[n])] = rank + 1
        ranks.append((rank, value, n))
    found = []
    for _, _, n in sorted(ranks):
        found.append(every[n])
        room -= weight(judge, every[n])
        if room < 0 and len(found) >= 4:
            break
    return found


def _shape(candidate: Candidate) -> tuple[int, ScheduleName]:
    return len(candidate.pipelines), candidate.schedule


def _size(candidate: Candidate) -> tuple[int, ScheduleName, int, bool, bool]:
    """Starts of one size mostly end in one place."""
    again = any(s.recompute for p in candidate.pipelines for s in p)
    return *_shape(candidate), len(candidate.peers), again, _is_closed(candidate)


def _is_closed(candidate: Candidate) -> bool:
    """Whether a first peer takes the end as well."""
    return any(len(p) > 1 and p[0].peer == p[-1].peer for p in candidate.pipelines)


def _with_spares(search: Search, best: SearchResult) -> SearchResult:
    """Peers that are left over get one more chance, where the budget ended before the moves."""
    judge = search.judge
    if search.open or search.space.stages is not None:
        return best
    if weight(judge, best.candidate) > 2_000:
        return best
    used = set(best.candidate.peers)
    for p in [p for p in range(len(judge.offers)) if p not in used][:8]:
        for candidate in with_peer(judge, best.candidate, p):
            if search.allows(candidate) and search.bound(candidate) < best.key:
                found = SearchResult(candidate, search.key(candidate))
                if found.key < best.key:
                    best = found
                    break
    return best


def _shaken(candidate: Candidate, rng: random.Random, peers: int) -> Candidate:
    """Cuts moved at random, and two peers exchanged."""
    pipelines = []
    for pipeline in candidate.pipelines:
        shares = list(pipeline)
        for i in range(len(shares) - 1):
            left, right = shares[i], shares[i + 1]
            if rng.random() < 0.6:
                at = rng.randint(left.start + 1, right.stop - 1)
                shares[i], shares[i + 1] = replace(left, stop=at), replace(right, start=at)
        pipelines.append(tuple(shares))
    a, b = rng.choice(candidate.peers), rng.randrange(peers)
    return replace(candidate, pipelines=tuple(pipelines)).with_peers({a: b, b: a})


# ---------------------------------------------------------------- what it says


def _others(judge: CostModel, fence: Fenced | None) -> dict[str, tuple[Candidate, float]]:
    """What the other planners find, and its seconds; of those that find something. Over hundreds of
    peers the plans of the literature's baselines, which use all of them, take longer to predict
    than to rule out."""
    request = judge.request
    found: dict[str, tuple[Candidate, float]] = {}
    everyone = min(len(request.offers), judge.operators)
    for name, planner in (("uniform", uniform), ("equal-compute", equal_compute)):
        if request.microbatches * everyone > MOST_VISITS:
            continue
        try:
            plan, report = planner(request, judge)
        except NoPlan:
            continue
        found[name] = from_plan(plan, judge.place), report.predicted.step_s
    if fence is not None:
        plan = to_plan(fence.candidate, [*judge.place], request.microbatch_size)
        found["op-fence"] = from_plan(plan, judge.place), fence.seconds
    return found
