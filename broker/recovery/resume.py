"""Going on after a loss: another peer in the place of one that is gone, and who gives what to whom.

Pure functions over plans and sets of snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import PlanReport, PlanWithReport
from ...proto.broker_pb2 import Renamed, Resume, SnapshotTransfer
from ..snapshots.sets import SnapshotSet, spans_of, spans_to_proto

__all__ = ["block_transfers", "resume", "substituted", "transfers"]


def substituted(planned: PlanWithReport, old: PeerId, new: PeerId) -> PlanWithReport:
    """Return the plan with one peer in the place of another. Who keeps snapshots is chosen anew."""
    plan = planned.plan.with_peers(lambda peer: new if peer == old else peer)
    report = _substituted_report(planned.report, old, new)
    return PlanWithReport(replace(plan, keepers=()), report)


def _substituted_report(report: PlanReport, old: PeerId, new: PeerId) -> PlanReport:
    def at(peer: PeerId) -> PeerId:
        return new if peer == old else peer

    predicted = replace(
        report.predicted,
        bottlenecks=(),  # sentences about who was there
        # Seconds are of who was there: nothing is learned of this one from them.
        peers=tuple(
            replace(p, peer=new, learned=0.0) if p.peer == old else p
            for p in report.predicted.peers
        ),
        links=tuple(
            replace(x, source=at(x.source), destination=at(x.destination))
            for x in report.predicted.links
        ),
    )
    spares = tuple(s for s in report.spares if s.peer != new)
    return replace(report, predicted=predicted, spares=spares)


def transfers(found: SnapshotSet, plan: Plan) -> tuple[SnapshotTransfer, ...]:
    """What of a set each holder of the plan lacks, and who gives it: somebody with a part in the
    plan where there is one. Those that only keep it come last."""
    out: list[SnapshotTransfer] = []
    part, spans = (*plan.peers, *plan.warm), spans_of(plan)
    given = dict.fromkeys(part, 0)
    for peer in plan.peers:
        for holder in found.overlapping(spans[peer]):
            have, where = found.where[holder]
            if peer in where:
                continue
            # Whoever gives least so far: a keeper of all does not have to feed everybody.
            source = min(where, key=lambda p: (p not in given, given.get(p, 0), where.index(p)))
            given[source] = given.get(source, 0) + 1
            out.append(
                SnapshotTransfer(
                    holder=holder,
                    source=source,
                    destination=peer,
                    spans=spans_to_proto(have),
                )
            )
    return tuple(out)


def block_transfers(plan: Plan, rebuilt: Sequence[PeerId]) -> tuple[SnapshotTransfer, ...]:
    """The transfers of blocks for peers that make their stage anew: in every stage that somebody
    still has, the first of its holders gives to each of them. Which blocks these are is known to
    those that have the graph."""
    alive = [[h for h in s.holders if h not in rebuilt] for s in plan.stages]
    givers, spans = dict.fromkeys(h[0] for h in alive if h), spans_of(plan)
    return tuple(
        SnapshotTransfer(
            holder=giver,
            source=giver,
            destination=peer,
            spans=spans_to_proto(spans[giver]),
        )
        for peer in rebuilt
        for giver in givers
    )


def resume(found: SnapshotSet, plan: Plan, names: Mapping[PeerId, PeerId]) -> Resume:
    """What an assignment says of the set that it goes on from. `names`: who took whose place since
    it was taken."""
    return Resume(
        term=found.term,
        round=found.round,
        holders=found.where,
        transfers=block_transfers(plan, found.rebuilt) if found.rebuilt else transfers(found, plan),
        renamed=[Renamed(old=old, to=new) for old, new in names.items()],
        files=found.checkpoint.files if found.checkpoint else (),
        live=found.live,
        rebuilt=found.rebuilt,
    )
