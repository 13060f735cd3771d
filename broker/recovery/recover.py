"""The ladder: what a replica does without some of its holders. Pure functions of a view.

Each function gives a decision, or None where the next is to be asked; reasons that people should
read are added to `why`. In the order in which they are asked:

1. `sibling`: the other holders of a lost one's stages do its microbatches; no committed step is
   done again. A peer that has applied the step under way refuses, and 3 is asked next.
2. `neighbour`: where no snapshots are left at peers, and the run allows it, another peer makes a
   lost stage anew from the stages around it (`dag/execute/neighbour.py`).
3. `snapshot`: another peer takes the part, and all go on from the newest set, of snapshots or, if
   there is none, of a checkpoint or of the starting weights; `nothing_left` says when that may not
   be.
4. `replan`: no single peer can take a part. Everything is planned anew, from the same set, if
   enough are left or the run waits for more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...dag.ir.convert import MAX_TEXT
from ...dag.plan.plan import PeerId
from ...dag.plan.report import PlanWithReport, Prediction
from ...proto.broker_pb2 import BUILDING, RUNNING
from .replacements import replacements, suited_left, unreached
from .resume import substituted
from .sibling import rerouted, rerouted_pairs
from .view import Pair, View

__all__ = ["Fail", "Recover", "Replan", "recover", "replan"]


@dataclass(frozen=True, slots=True)
class Recover:
    """The next term has the plan in `planned`. live: it goes on from what its holders have in their
    stages, of which those in `rebuilt` make theirs anew; else from the view's set. taken_by: by
    holder that is gone, who has its part. local: inputs that only peers with the data read; None:
    as before."""

    planned: PlanWithReport
    pairs: tuple[Pair, ...]
    live: bool = False
    rebuilt: tuple[PeerId, ...] = ()
    taken_by: Mapping[PeerId, PeerId] = field(default_factory=dict)
    local: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Replan:
    """Everybody goes back to the pool, and all are planned anew."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Decision that the replica cannot go on."""


def recover(
    view: View, gone: Sequence[PeerId], live: bool = True
) -> tuple[Recover | Replan | Fail, str]:
    """Decide what is done without these peers, and why, for people. `live`: what is in the stages
    of the others may be gone on from."""
    why: list[str] = []
    decision = (
        (sibling(view, gone, why) if live else None)
        or (neighbour(view, gone, why) if live else None)
        or nothing_left(view, why)
        or snapshot(view, gone, why)
        or replan(view, why)
    )
    return decision, "".join(why)


def sibling(view: View, gone: Sequence[PeerId], why: list[str]) -> Recover | None:
    ladder = view.run.requirements.recovery.ladder
    if "sibling" not in ladder or view.replica.phase not in (BUILDING, RUNNING):
        return None
    plan = rerouted(view.plan, gone) if any(p in view.plan.peers for p in gone) else None
    if plan is None or any(view.mine(p) is None for p in plan.peers):
        return None
    why.append("; its siblings do its microbatches")
    # What was predicted was for all of them.
    report = replace(view.replica.report, predicted=Prediction())
    pairs = rerouted_pairs(view.plan, view.pairs, gone)
    return Recover(PlanWithReport(plan, report), pairs, live=True)


def neighbour(view: View, gone: Sequence[PeerId], why: list[str]) -> Recover | None:
    asked = view.run.requirements.recovery.rebuilds and _nothing_at_peers(view)
    if not (asked and view.replica.has_own_steps and any(p in view.plan.peers for p in gone)):
        return None
    not_so, taken_by = "", None
    if view.replica.phase not in (BUILDING, RUNNING):
        not_so = "the training is over"
    elif all(p in gone for p in view.plan.peers):
        not_so = "nobody is left"
    elif (taken_by := replacements(view, gone)) is None:
        not_so = "nobody in the pool can take its part"
    else:
        not_so = unreached(view, taken_by.values(), taken_by)
    if not_so or taken_by is None:
        why.append(f". It is not made anew from its neighbours: {not_so}")
        return None
    since = view.replica.inexact_from or view.replica.committed
    anew = f"made anew from the blocks around it: the run is not exact from step {since} on"
    return replace(
        _in_place(view, taken_by, why, anew), live=True, rebuilt=tuple(taken_by.values())
    )


def nothing_left(view: View, why: list[str]) -> Fail | None:
    """No rung is left where the run may not go back to a checkpoint or to its beginning."""
    lost = view.replica.has_own_steps and _nothing_at_peers(view) and not view.run.begins_anew
    if view.run.requirements.recovery.ladder and not lost:
        return None
    why.append(". No snapshot of it is left, and its ladder has no checkpoint")
    return Fail()


def snapshot(view: View, gone: Sequence[PeerId], why: list[str]) -> Recover | None:
    taken_by = replacements(view, gone)
    return None if taken_by is None else _in_place(view, taken_by, why)


def replan(view: View, why: list[str]) -> Replan | Fail:
    fails = view.run.requirements.recovery.when_short == "fail"
    if view.replica.pausing or not fails or suited_left(view):
        return Replan()
    why.append(", and too few peers are left")
    return Fail()


def _nothing_at_peers(view: View) -> bool:
    return view.found is None or view.found.checkpoint is not None


def _in_place(
    view: View, taken_by: Mapping[PeerId, PeerId], why: list[str], also: str = ""
) -> Recover:
    """Others take the parts of lost holders, in the same plan."""
    planned, pairs, names = view.planned, view.pairs, []
    for old, new in taken_by.items():
        stages = ", ".join(str(k) for k in planned.plan.stages_of(old))
        kind = "warm" if new in view.plan.warm else "from the pool"
        names.append(f"stage {stages} -> {view.members.members[new].label} ({kind})")
        planned = substituted(planned, old, new)
        pairs = tuple((new if a == old else a, new if b == old else b) for a, b in pairs)
    if also:
        names.append(also)
    if names:
        told = (name[:MAX_TEXT] for name in names)
        report = replace(planned.report, reasons=(*told, "the rest is as before"))
        planned = PlanWithReport(planned.plan, report)
    why += [f"; {name}" for name in names]
    return Recover(planned, pairs, taken_by=taken_by)
