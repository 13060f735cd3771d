"""Who may be planned next, and why the others wait. Pure functions over runs and members.

Order: by priority (higher first), then first come. A run that could start as soon as peers come
back from other runs is not overtaken; one that lacks peers altogether is, since nobody knows when
they will join.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import WAITING
from ..membership.member import Member
from ..membership.membership import Membership
from ..records.submitted import run_of
from ..runs.replica import Replica

__all__ = [
    "Offered",
    "PlanShortage",
    "WaitReason",
    "by_hand",
    "consider",
    "in_order",
    "resolve",
    "shared",
    "suited",
]


@dataclass(frozen=True, slots=True)
class Offered:
    """Free peers that are enough to ask for a plan."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class WaitReason:
    """`blocks`: it waits for peers that work now, so nobody may overtake it."""

    code: str
    reason: str
    blocks: bool


def in_order(replicas: Iterable[Replica], last: Container[str] = ()) -> list[Replica]:
    """Runs in the order in which they get peers; `last`: owners whose runs come behind all
    others."""
    return sorted(
        replicas,
        key=lambda replica: (
            replica.run.owner in last,
            -replica.run.requirements.priority,
            replica.run.number,
        ),
    )


def consider(
    replica: Replica, members: Membership, now: float, lent: Container[PeerId] = ()
) -> Offered | WaitReason:
    """Whether the pool has what a run needs, or would have with the peers that are `lent`."""
    if (short := _without_spares(replica, members, now)) is not None:
        return short
    if replica.run.requirements.wanted:
        verdict = by_hand(replica, members, lent)
        # Once it has begun, a peer that is gone is not waited for.
        if not replica.record.term or isinstance(verdict, Offered) or verdict.blocks:
            return verdict
    able = suited(replica, members, now)
    free = tuple(m for m in able if m.state == "pool" or m.id in lent)
    resting = [m for m in able if m.state == "resting"]
    need, replicas, joined = _least(replica), _together(replica), len(members.members)
    steady = tuple(m for m in free if replica.steady(m, now))
    if len(free) >= need:
        return Offered(steady if len(steady) >= need else free)
    words = f"needs {need} peer{'s' if need > 1 else ''}"
    if replica.run.requirements.options.stages or need > 1:
        stages = replica.run.requirements.options.stages or 1
        words += f" ({stages} stages"
        pipelines = replica.run.requirements.options.pipelines or 1
        words += f" × {pipelines}" if pipelines > 1 else ""
        words += f" in each of {replicas} replicas)" if replicas > 1 else ")"
    text = f"{words}, has {len(free)} in the pool"
    busy = len(able) - len(free) - len(resting)
    taken = (m.run for m in able if m.run is not None and m.id not in lent)
    own = sum(run_of(run)[0] == replica.run.id for run in taken)
    for count, whom in ((own, "its other replicas"), (busy - own, "another run")):
        if count:
            text += f"; {count} more work{'s' if count == 1 else ''} for {whom}"
    text += _rest(resting)
    unsuited = [m for m in members.members.values() if not replica.run.suits(m)]
    web = sum(not replica.run.reads(m) for m in unsuited)
    if web:
        text += (
            f"; {web} may not read {replica.run.requirements.origins[0]}: its owner has to list "
            "the host (`web` in peer.toml), or the weights are uploaded (without model.where)"
        )
    if core := len(unsuited) - web:
        text += (
            f"; {core} with the core operator set cannot take part, because the "
            "run brings no core graph"
        )
    if left_out := joined - len(able) - len(unsuited):
        text += f"; {left_out} left out for a while, for a fault"
    if len(able) - own < need:  # its other replicas keep theirs until its end
        text += ": start more with `shoal join`"
    # Nobody knows when an owner opens a peer again.
    return WaitReason("peers", text, blocks=len(free) + busy >= need)


def _together(replica: Replica) -> int:
    """Replicas that are planned with it, itself included."""
    return replica.run.requirements.replicas if replica.context.forms else 1


def _least(replica: Replica) -> int:
    """The fewest peers that a plan can be asked for with."""
    return _together(replica) * replica.run.requirements.least


def _without_spares(replica: Replica, members: Membership, now: float) -> WaitReason | None:
    """Why it waits when it asks for more warm spares than there are peers beside those that it
    needs; once it has begun, it goes on with fewer."""
    spares = replica.run.requirements.recovery.warm_spares
    if replica.record.term or spares == "auto" or not spares:
        return None
    need = max(_least(replica), len(replica.run.requirements.wanted))
    able = suited(replica, members, now)
    if len(able) >= need + spares or len(able) < need:
        return None
    text = (
        f"needs {need} peer{'s' if need > 1 else ''} and {spares} more as warm spares "
        f"(recovery.warm_spares), has {len(able)}: start more with `shoal join`, or submit it with "
        "fewer spares"
    )
    return WaitReason("peers", text, blocks=False)


def _rest(resting: Sequence[Member]) -> str:
    if len(resting) == 1 and resting[0].closed is not None:
        return f"; 1 more rests: {resting[0].closed.text}"
    return f"; {len(resting)} more rest, kept out by their owners" if resting else ""


def suited(replica: Replica, members: Membership, now: float) -> list[Member]:
    """Members that could take part if they were free, in order of joining; without those that are
    left out for a fault."""
    everybody = members.members.values()
    return [
        m for m in everybody if replica.run.suits(m) and not replica.context.suspects.out(m.id, now)
    ]


def resolve(wanted: PeerId, members: Membership) -> list[Member]:
    """Members that a hand-written plan may mean: the one with that id, or all with that name."""
    by_id = members.members.get(wanted)
    if by_id is not None:
        return [by_id]
    return [m for m in members.members.values() if m.profile.name == wanted]


def by_hand(
    replica: Replica, members: Membership, lent: Container[PeerId] = ()
) -> Offered | WaitReason:
    """Whether the pool, and what is `lent`, has the peers that a hand-written plan names."""
    found: list[Member] = []
    problems: list[str] = []
    blocks = True
    for wanted in replica.run.requirements.wanted:
        named = resolve(wanted, members)
        if len(named) == 1 and replica.run.suits(named[0]) and named[0] not in found:
            found.append(named[0])
            if named[0].run is not None and named[0].id not in lent:
                problems.append(f"{wanted} works for run {named[0].run}")
            elif named[0].closed is not None:
                problems.append(f"{wanted} rests: {named[0].closed.text}")
                blocks = False
            continue
        blocks = False
        if not named:
            problems.append(f"{wanted} has not joined")
        elif len(named) > 1:
            problems.append(f"{wanted} is the name of {len(named)} peers: use an id")
        elif named[0] in found:
            problems.append(f"{wanted} is a peer that the plan names twice, by id and by name")
        else:
            why = "has the core operator set and the run brings no core graph"
            if not replica.run.reads(named[0]):
                origin = replica.run.requirements.origins[0]
                why = f"may not read {origin} (`web` in its owner's peer.toml)"
            problems.append(f"{wanted} {why}")
    if not problems:
        return Offered(tuple(found))
    need = len(replica.run.requirements.wanted)
    text = f"its plan needs {need} peers, has {need - len(problems)} of them: {'; '.join(problems)}"
    return WaitReason("peers", text, blocks)


def shared(
    replica: Replica, others: Iterable[Replica], members: Sequence[Member]
) -> tuple[Member, ...]:
    """Return the `members` that this replica is planned over: all, unless others of its run wait
    too. Each of those that wait gets about as many, and places are cut only where there are too
    few. They stay in the order of `members`, that of joining, in which planners take them."""
    waiting = [
        r
        for r in others
        if r.record.run.id == replica.record.run.id
        and r.record.phase == WAITING
        and not r.record.paused
    ]
    count = max(1, len(waiting))
    ordered = sorted(members, key=lambda m: (m.profile.place, m.id))
    at = next((i for i, r in enumerate(waiting) if r is replica), 0)
    places = [m.profile.place for m in ordered]
    borders = [i for i, (a, b) in enumerate(pairwise(places), 1) if a != b]
    even = [len(ordered) * i // count for i in range(count + 1)]
    if len(borders) >= count - 1:
        inner, left = list[int](), borders
        for i, cut in enumerate(even[1:-1], 1):
            room = left[: len(left) - (count - 1 - i)]  # as many as the later cuts need remain
            inner.append(min(room, key=lambda border: abs(border - cut)))
            left = [b for b in left if b > inner[-1]]
        even = [0, *inner, len(ordered)]
    mine = {m.id for m in ordered[even[at] : even[at + 1]]}
    return tuple(m for m in members if m.id in mine or not mine)


# A run that no plan was found for: what it needs, and when it is worth asking again.
#
# A planner that was refused by the memory of some peers is refused by fewer of them, too. So the
# run waits until somebody is free who was not asked. It is overtaken unless peers that work now
# have what is short.


@dataclass(frozen=True, slots=True)
class PlanShortage:
    """What a planner said. `asked`: the incarnations that it was asked with; `short_bytes`: of
    device memory, 0 where more peers may help with however little."""

    asked: Mapping[PeerId, tuple[str, int]]
    code: str
    reason: str
    short_bytes: int

    def open_to(self, free: Iterable[Member]) -> bool:
        """Whether another plan may be found with these."""
        return any(self.asked.get(m.id) != (m.boot, m.counter) for m in free)

    def waits(self, able: Iterable[Member]) -> WaitReason:
        """Why the run waits; `able`: all members that could take part if they were free."""
        others = [m for m in able if m.id not in self.asked]
        working = [m for m in others if m.run is not None]
        text = self.reason
        if working:
            work = "peer works" if len(working) == 1 else "peers work"
            text += f"; {len(working)} more {work} for other runs"
        if resting := len(others) - len(working):
            text += f"; {resting} more rest{'s' if resting == 1 else ''}"
        theirs = sum(m.profile.device_memory_bytes for m in working)
        return WaitReason(self.code, text, blocks=bool(working) and theirs >= self.short_bytes)
