"""How a term of a replica begins.

- Everybody with a part in the plan gets an Assign: holders, and peers of the pool that keep
  snapshots (warm). It says from which step to go on, and who gives which snapshots to whom.
- A replica goes on from the newest set of snapshots that still lies somewhere, whole; without one
  it begins with its starting weights. Both replay steps that are committed already: their reports
  are compared with what was told before, and have no other effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...dag.plan.plan import PeerId, Plan, SnapshotKeeper
from ...dag.plan.plan_slice import PlanSlice
from ...dag.plan.report import PlanWithReport
from ...dag.plan.routes import IN_ORDER, routes_digest, swapped_digest
from ...dag.schedule.convert_plan import plan_to_proto
from ...dag.schedule.convert_report import report_to_proto
from ...dag.schedule.convert_slice import slice_to_proto
from ...dag.schedule.slices import PlanSlices
from ...proto.broker_pb2 import (
    Assign,
    BrokerMessage,
    DialOrder,
    Renamed,
    RoundBegun,
    RunEvent,
)
from ...proto.common_pb2 import Reason
from ...proto.graph_pb2 import CORE
from ..events import Instruction, Tell
from ..membership.member import Member
from ..policies.policies import policy_of
from ..recovery.recover import Recover
from ..recovery.resume import resume, transfers
from ..recovery.view import Pair
from ..snapshots.keepers import choose_keepers, ring_pairs
from ..snapshots.sets import SnapshotSet
from .context import ReplicaContext, Term
from .snapshots import ReplicaSnapshots

__all__ = ["assignment", "begin_term", "tell_part"]

BLOCKS = 0
"""In place of a term: what lost stages are made from, of which nothing is reported."""


def begin_term(
    context: ReplicaContext,
    snapshots: ReplicaSnapshots,
    wanted: Recover,
    found: SnapshotSet | None,
    now: float,
) -> tuple[list[Instruction], int]:
    """Return what is to be told, and from which step on the replica is not exact then. The peers of
    the plan are all in the pool, or have a part already. `found`: the set that it goes on from,
    where that is not what is in the stages."""
    record = context.record
    if wanted.live:
        step = record.committed
        term = BLOCKS if wanted.rebuilt else record.term
        found = SnapshotSet(term, step, {}, live=True, rebuilt=wanted.rebuilt)
    work, rounds = context.work, context.rounds
    # The version of the first round is the starting weights or a checkpoint: always there.
    first = rounds is not None and context.round == rounds.versions.first
    within = work is not None and (found is not None or first)
    fresh = 0 if rounds is None or within else record.committed
    step = found.step if found else fresh
    mine = context.work_from(step, now) if within else None
    plan, report = _with_keepers(context, snapshots, wanted.planned, found, now)
    before, rerouted = context.parts, _other_routes(context, plan, step)
    renamed = [Renamed(old=a, to=b) for a, b in wanted.taken_by.items()]
    event = RunEvent(plan=plan_to_proto(plan), report=report_to_proto(report), renamed=renamed)
    event.local.extend(record.local if wanted.local is None else wanted.local)
    out: list[Instruction] = [context.publish(event, now, PlanWithReport(plan, report))]
    inexact_from = record.inexact_from
    if wanted.rebuilt:
        inexact_from = inexact_from or step
    elif step < inexact_from:
        # Back to before that; where routes are no plain ones, maybe to when there were others.
        inexact_from = max(1, step) if routes_digest(plan) != IN_ORDER else 0
    if rerouted:
        inexact_from = inexact_from or step or record.committed
    snapshots.begin_term(step)
    record.checkpoints.given_up()
    members, slices = context.members, PlanSlices(plan)
    context.term = term_ = Term(
        plan,
        report,
        pairs=wanted.pairs or slices.pairs,
        begun_from=found,
        speed_of={p: members.members[p].offer.flops_per_s for p in plan.peers},
    )
    base = assignment(context, step, found)
    if mine is not None and rounds is not None:  # it goes on with it
        policy, mine.term = policy_of(context.run), record.term
        policy.replanned(record, rounds.versions.round, mine)
        begun = RoundBegun(round=rounds.versions.round, work=[mine])
        out.append(context.publish(RunEvent(round_begun=begun), now))
        base.round.CopyFrom(policy.start_of(rounds, record.id, mine))
        base.round.late = 0  # `found` is from behind where the version landed
        base.round.evaluate &= step == mine.first_step
    term_.transfers = tuple(base.resume.transfers)
    dials, near = _dials(context, plan)
    for peer in context.parts:
        member = members.members[peer]
        if member.state == "pool":
            out += members.assign(member, record.id)
        # Who makes a stage anew asks everybody.
        known = plan.peers if wanted.rebuilt else near[peer]
        out.append(tell_part(context, member, base, slices.of(peer, known), dials[peer]))
    gone = [p for p in before if p not in context.parts]
    reason = Reason(code="released", text="the run goes on without it")
    return out + context.release(gone, reason, now), inexact_from


def _other_routes(context: ReplicaContext, plan: Plan, step: int) -> bool:
    """Whether some microbatch goes another way through the graph than in the steps that were told
    of."""
    record = context.record
    told = max(step, record.committed)
    if record.plan is not None:
        return routes_digest(record.plan, told) != routes_digest(plan, told)
    # The first plan; it may go on from another run's checkpoint.
    found = record.run.spec.resumed
    old = [(s.start, s.middle, s.stop) for s in found.swapped]
    had = swapped_digest(plan, old) if old else found.routes
    return step > 0 and had != routes_digest(plan, step)


def tell_part(
    context: ReplicaContext,
    member: Member,
    base: Assign,
    part: PlanSlice,
    dials: Iterable[DialOrder],
) -> Tell:
    """The Assign of one peer. `base`: of `assignment`."""
    assign, spec = Assign(), context.run.spec
    assign.CopyFrom(base)
    core = member.profile.operator_set == CORE
    assign.graph.CopyFrom(spec.core_graph if core else spec.graph)
    assign.slice.CopyFrom(slice_to_proto(part))
    assign.dials.extend(dials)
    return Tell(member.stream, BrokerMessage(assign=assign))


def assignment(context: ReplicaContext, step: int, found: SnapshotSet | None) -> Assign:
    """The part of an Assign that is the same for all peers of a term."""
    record, run = context.record, context.run
    base = Assign(
        run=record.id,
        term=record.term,
        full_graph=run.spec.graph,
        weights=run.spec.weights,
        data=record.data,
        training=run.requirements.training,
        submitter=run.owner,
        local=record.local,
        first_step=step,
        lossless_snapshots=run.requirements.lossless_snapshots,
        steps=record.last,
    )
    if run.spec.HasField("recipe"):
        base.recipe.CopyFrom(run.spec.recipe)
    if found is not None:
        assert record.plan is not None, record
        own = found.checkpoint is None or found.checkpoint.run == run.id
        names = record.names.get(found.term, {}) if own else {}
        base.resume.CopyFrom(resume(found, record.plan, names))
    return base


def _dials(
    context: ReplicaContext, plan: Plan
) -> tuple[dict[PeerId, list[DialOrder]], dict[PeerId, list[PeerId]]]:
    """By peer, whom it dials, and with whom it has links, whoever dials. Of each pair the one that
    stands first does, or the one that can."""
    orders: dict[PeerId, list[DialOrder]] = {p: [] for p in context.parts}
    near: dict[PeerId, list[PeerId]] = {p: [] for p in context.parts}
    links: dict[frozenset[PeerId], Pair] = {}
    keepers = [(k.holder, k.peer) for k in plan.keepers]
    given = [(PeerId(g.source), PeerId(g.destination)) for g in context.term.transfers]
    for pair in (*context.term.pairs, *keepers, *ring_pairs(plan), *given):
        links.setdefault(frozenset(pair), pair)
    for a, b in links.values():
        near[a].append(b)
        near[b].append(a)
        way = context.members.dial(a, b)
        if way is not None:  # the planner's pairs are looked at before
            orders[way[0]].append(way[1])
    return orders, near


def _with_keepers(
    context: ReplicaContext,
    snapshots: ReplicaSnapshots,
    planned: PlanWithReport,
    found: SnapshotSet | None,
    now: float,
) -> PlanWithReport:
    run = context.run
    if not run.takes_snapshots:
        return planned
    warm = [m for p in context.parts if (m := context.mine(p)) and m.closed is None]
    keepers = choose_keepers(
        planned,
        (*warm, *context.spares(planned.plan.peers)),
        context.members,
        run.requirements.recovery.spares,
        lambda m: context.rank(m, now),
        snapshots.unreliable,
    )
    plan = replace(planned.plan, keepers=keepers)
    if found is None:
        return PlanWithReport(plan, planned.report)
    part = (*plan.peers, *plan.warm)
    givers = {(PeerId(g.destination), PeerId(g.source)) for g in transfers(found, plan)}
    more = tuple(SnapshotKeeper(h, p) for h, p in sorted(givers) if p not in part)
    return PlanWithReport(replace(plan, keepers=(*keepers, *more)), planned.report)
