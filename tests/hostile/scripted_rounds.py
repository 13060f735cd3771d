"""Rounds of one run with scripted peers: a real broker machine, and members of which each is one
replica. They say what honest ones would, by what reaches them; a liar does what its `Lie` says.

Nothing here knows how the broker decides: messages go in, messages come out, time passes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.broker.events import FormReplicas, Instruction, MakePlan, PlanReady, ReplicasFormed
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.dag.plan.plan import Plan
from shoal.proto.broker_pb2 import (
    Formation,
    FormedReplica,
    Heartbeat,
    Outcome,
    Ready,
    RoundDone,
    RoundPlan,
    RoundReport,
    RoundStart,
    StepReport,
)
from shoal.proto.common_pb2 import Reason
from shoal.tests.broker.conftest import World, make_plan, make_spec

ELEMENTS = 1 << 20
"""Of the vector: enough that each member adds up a share."""
BEAT_S = 5.0


@dataclass
class Lie:
    """Parts of a member that are not as others' are; all is honest by default. Who is withheld
    from gets nothing of it; who is cheated gets another sum, or version, than others."""

    withholds: frozenset[str] = frozenset()
    cheats: frozenset[str] = frozenset()
    lacks: tuple[str, ...] = ()
    """Whom it says that it lacks, in each attempt."""
    problem: str = ""
    """What it says in place of having made the version."""
    silent: bool = False
    """It reports no version."""
    late: bool = False
    """It has no contribution, ever."""
    wrong: bool = False
    """It reports another version than it made."""
    again: int = 1
    """How often it says all that."""


@dataclass
class Member:
    """One peer, which holds a replica by itself. step_s: how long a local step takes it."""

    name: str
    lie: Lie = field(default_factory=Lie)
    step_s: float = 1.0
    run: str = ""
    term: int = 0
    start: RoundStart | None = None
    plan: RoundPlan | None = None
    said: bool = False
    step: int = 0


class ScriptedRounds:
    """`lies`: by name of a member; `replicas` of them, p0 and so on."""

    def __init__(
        self, replicas: int, lies: dict[str, Lie], *, steps: int = 4000, kind: str = "local"
    ) -> None:
        self.world = World(BrokerMachine("broker-1", BrokerOptions(probe_s=0.0)))
        names = [f"p{i}" for i in range(replicas)]
        self.members = {n: Member(n, lies.get(n, Lie())) for n in names}
        self.done: list[RoundDone] = []
        self.notes: list[str] = []
        for name in names:
            self.world.join(name)
        each = 4 * replicas
        tables: dict[str, Any] = {
            "sync": {"kind": kind, "every": 2},
            "plan": {"replicas": replicas},
        }
        self._each = each // replicas
        if kind == "federated":  # a batch is a client's
            tables["sync"] = {"kind": kind, "per_round": 2 * replicas}
            clients = {"kind": "iid", "clients": 4 * replicas}
            tables["data"] = {"kind": "arrays", "source": "x.npz", "partition": clients}
            self._each = each
        spec = make_spec(steps, each, **tables)
        if kind == "federated":
            spec.client_sizes.extend([3] * 4 * replicas)
        self.run, out = self.world.submit(spec)
        self.settle(out)

    # ------------------------------------------------------------ what happens

    def settle(self, out: Iterable[Instruction]) -> None:
        """Pass on what the broker says and what members answer, until all wait."""
        world, queue = self.world, list(out)
        while queue:
            out, queue = queue, []
            for event in world.published(out):
                if event.HasField("round_done"):
                    self.done.append(event.round_done)
                self.notes += [event.note] if event.note else []
            for ask in out:
                if isinstance(ask, FormReplicas):
                    groups = [(o.peer,) for o in ask.peers]
                    formation = Formation(
                        kind="local", replicas=[FormedReplica(peers=g) for g in groups]
                    )
                    plans = tuple(
                        PlanReady(ask.replica, ask.version, self._plan(*g)) for g in groups
                    )
                    queue += world.handle(
                        ReplicasFormed(ask.replica, ask.version, formation, plans)
                    )
                elif isinstance(ask, MakePlan):
                    plan = self._plan(ask.peers[0].peer)
                    queue += world.handle(PlanReady(ask.replica, ask.version, plan))
            for name, member in self.members.items():
                for message in world.told(out, name) if name in world.streams else ():
                    queue += self._heard(member, message)

    def _plan(self, peer: str) -> Plan:
        plan = make_plan(peer, microbatches=self._each)
        assert plan.outline is not None
        [stage] = plan.outline.stages
        stages = (replace(stage, elements=ELEMENTS, trainable=True),)
        return replace(plan, outline=replace(plan.outline, stages=stages))

    def _heard(self, member: Member, message: Any) -> list[Instruction]:
        world, kind = self.world, message.WhichOneof("kind")
        body = getattr(message, kind)
        if kind == "assign":
            member.run, member.term, member.step = body.run, body.term, body.first_step
            member.start = member.plan = None
            if body.HasField("round"):
                member.start = body.round
            return world.say(member.name, ready=Ready(run=body.run, term=body.term))
        if kind == "leave":
            return world.drained(member.name, body.run)
        if kind == "start" and member.start is not None:
            return self._works(member)
        if kind == "round_start" and (member.start is None or body.round > member.start.round):
            member.start, member.plan = body, None
            return self._works(member)
        if kind == "round_plan":
            member.plan, member.said = body, False
            return self._lies(member)
        return []

    def _works(self, member: Member) -> list[Instruction]:
        start, out = member.start, list[Instruction]()
        if start is None or member.lie.late:
            return []
        while member.step < start.first_step + start.steps:
            report = StepReport(run=member.run, term=member.term, step=member.step)
            report.outcome.CopyFrom(Outcome(loss=1.0, weight=1.0))
            self.world.now += member.step_s / len(self.members)
            out += self.world.say(member.name, step=report)
            member.step += 1
        return out + self._report(member, start.round, 0)

    def _report(self, member: Member, number: int, attempt: int, **keys: Any) -> list[Instruction]:
        report = RoundReport(
            run=member.run, term=member.term, round=number, attempt=attempt, **keys
        )
        return self.world.say(member.name, round=report)

    def _lies(self, member: Member) -> list[Instruction]:
        """Say what a liar does as soon as it knows the plan."""
        lie, plan, out = member.lie, member.plan, list[Instruction]()
        assert plan is not None
        for _ in range(lie.again if lie.lacks or lie.problem else 0):
            member.said = True
            code = lie.problem or "late"
            out += self._report(
                member,
                plan.round,
                plan.attempt,
                problem=Reason(code=code, text="so it is"),
                lacks=lie.lacks,
            )
        return out

    # ------------------------------------------------------------ the exchange

    def _lacking(self, member: Member) -> tuple[list[str], bool]:
        """Return who does not send what a member is to get, and whether that is contributions."""
        plan, me = member.plan, member.name
        assert plan is not None
        gives, sums = [], []
        for s in plan.segments:
            if s.aggregator == me:
                gives += [g.peer for g in s.givers if me in self.members[g.peer].lie.withholds]
            else:
                adder = self.members[s.aggregator]
                waits = adder.plan is not None and self._lacks_of(adder, s.start)
                if me in s.takers and (waits or me in adder.lie.withholds):
                    sums.append(s.aggregator)
            sources = [v.source for v in s.versions if v.destination == me]
            sums += [v for v in sources if me in self.members[v].lie.withholds]
        return (gives, True) if gives else (sums, False)

    def _lacks_of(self, adder: Member, start: int) -> bool:
        """Whether an adder does not get all contributions to a segment."""
        assert adder.plan is not None
        of = (s for s in adder.plan.segments if s.start == start)
        members = self.members
        return any(adder.name in members[g.peer].lie.withholds for s in of for g in s.givers)

    def _makes(self, member: Member) -> list[Instruction]:
        """Report a version, if all of it is there."""
        plan, start = member.plan, member.start
        idle = plan is None or member.said or member.lie.silent
        if idle or (start is not None and plan.round < start.round):
            return []
        if self._lacking(member)[0]:
            return []
        parts = []
        for s in plan.segments:
            sources = [v.source for v in s.versions if v.destination == member.name]
            by = self.members[sources[0] if sources else s.aggregator]
            cheated = member.name in by.lie.cheats and by is not member
            parts.append(hash((plan.round, s.start)) % 2**63 + cheated)
        made = sum(p * (i + 1) for i, p in enumerate(parts)) + member.lie.wrong
        member.said = True
        return self._report(member, plan.round, plan.attempt, hashes=[made % 2**64], parts=parts)

    def _complains(self, member: Member) -> list[Instruction]:
        """Report who is waited for, behind the plan's patience."""
        plan = member.plan
        if plan is None or member.said or member.lie.silent or member.lie.lacks:
            return []
        lacks, contributions = self._lacking(member)
        if not lacks:
            return []
        member.said = True
        code = "late" if contributions else "unsummed"
        problem = Reason(code=code, text="waits")
        return self._report(member, plan.round, plan.attempt, problem=problem, lacks=set(lacks))

    # ------------------------------------------------------------ time

    @property
    def over(self) -> bool:
        return self.world.machine.runs[self.run].ended

    def play(self, rounds: int, most_s: float = 1e5) -> None:
        """Play until so many rounds are committed, or the run is over, or nothing comes of it."""
        until = self.world.now + most_s
        while len(self.done) < rounds and not self.over and self.world.now < until:
            before = len(self.done), self.world.now
            self._each_says(self._makes)
            if (len(self.done), self.world.now) != before:
                continue
            self._beat()
            plans = [m.plan for m in self.members.values() if m.plan is not None]
            if plans and self.world.now >= self._patient_until(plans):
                self._each_says(self._complains)

    def _patient_until(self, plans: list[RoundPlan]) -> float:
        at = max((p.round, p.attempt) for p in plans)
        if getattr(self, "_at", None) != at:
            self._at, self._since = at, self.world.now
        return self._since + max(p.patience_s for p in plans)

    def _each_says(self, what: Callable[[Member], list[Instruction]]) -> None:
        for member in self.members.values():
            self.settle(what(member))

    def _beat(self) -> None:
        out = self.world.wait(BEAT_S)
        for name in self.members:
            out += self.world.say(name, heartbeat=Heartbeat())
        self.settle(out)

    # ------------------------------------------------------------ what came of it

    def inside(self, last: int) -> Counter[str]:
        """Count in how many of the last rounds each was a member."""
        return Counter(f"p{m.replica}" for d in self.done[-last:] for m in d.members)

    def shares(self) -> dict[str, int]:
        """Microbatches of the round under way, by member."""
        rounds = self.world.machine.runs[self.run].record.rounds
        assert rounds is not None
        return {f"p{n}": sum(s.count for s in w.samples) for n, w in rounds.work.given.items()}


def any_lie(rng: random.Random, others: list[str]) -> Lie:
    """One or several at once, against some of the others."""
    some = frozenset(rng.sample(others, rng.randint(1, len(others))))
    lie = Lie(again=rng.choice((1, 3)))
    for kind in rng.sample(
        ("withholds", "cheats", "lacks", "problem", "silent", "late", "wrong"), 2
    ):
        value: Any = {"withholds": some, "cheats": some, "lacks": tuple(sorted(some))}.get(
            kind, True
        )
        if kind == "problem":
            value = rng.choice(("overflow", "refused", "missing", "late", "unsummed", "what"))
        lie = replace(lie, **{kind: value})
    return lie
