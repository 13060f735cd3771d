"""Who computes what, and when: I1, I2 and I4, followed from the plan's lists.

A peer's part in a run is walked along its list of actions, step by step, from what its machine
wants computed and what its device says. So an action that is left out, done twice, out of order or
before its inputs came is seen when it is wanted; a step that is committed too early when it is
published.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...broker import events as b
from ...broker.records.submitted import replica_id, run_of
from ...dag.plan.action import ROUNDS, TRAITS, Action, Kind, training_visits
from ...dag.plan.plan import PeerId
from ...dag.plan.visit_lists import halved
from ...dag.schedule.flow import Flow, Role, Transfer
from ...peer.core import events as p
from ...peer.core.snapshots import SnapshotId
from ...peer.core.step import ENDLESS, transfer_of
from ...proto import broker_pb2
from ..virtual.clock import Observed
from ..virtual.world import World
from .violation import Broken, Check

__all__ = ["WorkCheck"]


class _Part:
    """A peer's part in one term of a run."""

    def __init__(self, who: str, built: p.Built, first: int) -> None:
        self.peer, self.flow = PeerId(who), built.flow
        self.rounds = built.vector is not None
        self.run, self.term = built.run, built.term
        self.steps = ENDLESS if self.rounds else built.steps
        self.evaluate = built.flow.evaluation_actions(self.peer)
        self.eval_every = 0 if self.rounds else built.eval_every
        self.step = self.applied = first
        self.at = 0
        self.evaluating = self.computing = False
        self.there: set[tuple[int, Transfer]] = set()
        """(step, transfer) that came or was left here, and that no action took yet."""
        self.to_send: set[tuple[int, Transfer]] = set()

    @property
    def train(self) -> Sequence[Action]:
        return self.flow.at(self.step).actions(self.peer)

    @property
    def list(self) -> Sequence[Action]:
        return self.evaluate if self.evaluating else self.train

    def begin(self, step: int, action: Action) -> None:
        if self.computing:
            raise Broken("I2", f"{self.peer} computes {action} of step {step} beside another one")
        if self.rounds and not self.at and self.evaluate and action == self.evaluate[0]:
            self.evaluating = True  # of the version, in front of a step
        over = self.step >= self.steps
        if over or (step, action) != (self.step, self.list[self.at]):
            wanted = "nothing more" if over else f"{self.list[self.at]} of step {self.step}"
            mine = action in self.train or action in self.evaluate
            raise Broken(
                "I2" if mine else "I4",
                f"{self.peer} computes {action} of step {step}, and its list has {wanted} now",
            )
        for transfer in self.flow.at(step).takes(self.peer, action):
            if (step, transfer) not in self.there:
                raise Broken(
                    "I2", f"{self.peer} computes {action} of step {step} without {transfer}"
                )
            self.there.remove((step, transfer))
        self.computing = True

    def end(self, step: int, action: Action) -> None:
        if not self.computing or (step, action) != (self.step, self.list[self.at]):
            raise Broken("I2", f"{self.peer} ended {action} of step {step}, which it had not begun")
        self.computing = False
        for transfer in self.flow.at(step).gives(self.peer, action):
            (self.there if transfer.is_local else self.to_send).add((step, transfer))
        self.applied += action.kind is Kind.UPDATE
        self.at += 1
        if self.at < len(self.list):
            return
        self.at = 0
        of_version = self.evaluating and self.rounds
        self.evaluating = not self.evaluating and self._evaluates()
        self.step += not (self.evaluating or of_version)

    def _evaluates(self) -> bool:
        done = self.step + 1
        return bool(
            self.eval_every
            and self.evaluate
            and (done % self.eval_every == 0 or done == self.steps)
        )


class WorkCheck(Check):
    """Checks I1, I2 and I4: who computes what, and when, by the plan's lists. `losses` and `norms`
    by step: of the plain loop, as far as they go."""

    wants = (
        p.Compute,
        p.Computed,
        p.FrameArrived,
        p.SendFrame,
        p.Built,
        p.Started,
        p.Discard,
        p.Exit,
        b.PeerSaid,
        b.Publish,
        b.Started,
    )

    def __init__(
        self, world: World, losses: Sequence[float], norms: Sequence[float], tolerance: float
    ) -> None:
        super().__init__(world)
        self.most_terms = math.inf
        """More plans than these are a violation: nothing happened that asks for another one."""
        self._expected = {"loss": losses, "grad_norm": norms}
        self._tolerance = tolerance
        self._parts: dict[str, _Part] = {}
        self._plans: dict[tuple[str, int], Flow] = {}
        self._committed: dict[str, int] = {}
        self._inexact: dict[str, int] = {}
        """By run, the first step after a lost stage was made anew: no loss is compared from there
        on, as the run itself says."""
        self._reported: dict[tuple[str, int], set[PeerId | None]] = {}
        """By run and step: who said so, in any term."""

    def observe(self, seen: Observed) -> None:
        record, who = seen.record, seen.who
        match record:
            case p.Compute(action=action) | p.Computed(action=action) if action.kind in ROUNDS:
                pass
            case p.FrameArrived(key) | p.SendFrame(key) if key.role is Role.ROUND:
                pass
            case p.Compute(run, term, step, action):
                self._part(who, run, term, "computes", action).begin(step, action)
            case p.Computed(run, term, step, action, result):
                part = self._parts.get(who)
                if part is not None and (part.run, part.term) == (run, term):
                    part.end(step, action)
                    self._memory(who, result.peak_bytes, action, step)
            case p.FrameArrived(key) if key.role is not Role.SNAPSHOT:
                part = self._parts.get(who)
                if part is not None and (part.run, part.term) == (key.run, key.term):
                    part.there.add((key.step, transfer_of(key)))
            case p.SendFrame(key) if key.role is Role.SNAPSHOT:
                if SnapshotId.of_frame(key) not in self.world.peers[who].machine.keeping.held:
                    raise Broken("I2", f"{who} gives {key}, which it does not have")
            case p.SendFrame(key) if key.role is not Role.PROBE:
                part = self._part(who, key.run, key.term, "sends", key)
                entry = key.step, transfer_of(key)
                if entry not in part.to_send:
                    raise Broken("I2", f"{who} sends {key}, which it does not have or has sent")
                part.to_send.remove(entry)
            case p.Built():
                self._built(who, record)
            case p.Started() | p.Discard() | p.Exit():
                self._parts.pop(who, None)
            case b.PeerSaid(stream, message) if message.HasField("step"):
                peer = self.world.broker.machine.members.streams.get(stream)
                self._reported.setdefault((message.step.run, message.step.step), set()).add(peer)
            case b.Publish(run, event) if event.HasField("plan"):
                if event.term > self.most_terms:
                    why = self.world.broker.machine.runs[b.RunId(run)].state.reason.text
                    raise Broken("I9", f"{run} needs plan {event.term}, and nobody was lost: {why}")
            case b.Publish(run, event) if event.HasField("step"):
                self._commit(replica_id(run, event.replica), event)
            case b.Publish(run, event) if event.HasField("state"):
                for replica in event.state.replicas:
                    self._inexact[replica.replica] = replica.inexact_from
            case b.Started():
                self._restarted()

    def _part(self, who: str, run: str, term: int, does: str, what: object) -> _Part:
        """Say what it does, which is written out only where it may not: writing takes longer than
        looking."""
        part = self._parts.get(who)
        if part is None or part.term != term or part.run != run:
            named = f"{run}, term {term}"
            raise Broken("I4", f"{who} {does} {what} for {named}, of which it holds no part")
        return part

    def _built(self, who: str, built: p.Built) -> None:
        part = self.world.peers[who].machine.assignment
        if part is None or not part.matches(built.run, built.term):
            return  # an answer that nobody waits for any more
        self._parts[who] = _Part(who, built, part.step)
        self._memory(who, built.device_bytes, "its stages")
        if (built.run, built.term) not in self._plans:
            whole = self.world.orders.flow(built.run, built.term)
            self._plans[built.run, built.term] = whole
            for flow in filter(None, (whole, whole.full)):
                _check_routes(flow)
        peer, whole = PeerId(who), self._plans[built.run, built.term]
        for mine, its in (
            (built.flow, whole),
            (built.flow.full or built.flow, whole.full or whole),
        ):
            if mine.actions(peer) == its.actions(peer):
                continue
            raise Broken("I4", f"the list of {who} is not the one that the plan has for it")

    def _memory(self, who: str, used: int, what: object, step: int | None = None) -> None:
        most = self.world.peers[who].spec.memory_bytes
        if used > most > 0:
            when = "" if step is None else f" of step {step}"
            raise Broken("I4", f"{who} uses {used} bytes for {what}{when}: it announced {most}")

    def _restarted(self) -> None:
        """Steps that an earlier process wrote down and did not come to publish."""
        for run, known in self.world.broker.machine.runs.items():
            for event in known.record.history.events:
                name = replica_id(run, event.replica)
                if event.HasField("step") and event.step.step >= self._done(name):
                    self._commit(name, event)

    def _done(self, run: str) -> int:
        """Steps that were committed before, those of a checkpoint that it goes on from included."""
        name, _ = run_of(run)
        known = self.world.broker.machine.runs[name]
        first = 0 if known.has_rounds else known.submitted.spec.resumed.step
        return self._committed.get(run, first)

    def _commit(self, run: str, event: broker_pb2.RunEvent) -> None:
        done, wanted = event.step, self._done(run)
        step = done.step
        if step != wanted:
            raise Broken("I2", f"step {step} is committed, expected step {wanted}")
        self._committed[run] = step + 1
        reported = self._reported.pop((run, step), set())
        for peer in self._plans[run, event.term].plan.peers:
            if peer not in reported:
                raise Broken("I2", f"step {step} is committed, and {peer} has not reported it")
            part = self._parts.get(peer)
            if part is not None and part.run == run and part.applied <= step:
                raise Broken(
                    "I2", f"step {step} is committed, and {peer} has applied {part.applied} updates"
                )
        inexact = self._inexact.get(run, 0)
        for name, expected in self._expected.items() if not 0 < inexact <= step else ():
            if step < len(expected):
                self._compare(step, name, getattr(done.outcome, name), expected[step])

    def _compare(self, step: int, name: str, got: float, wanted: float) -> None:
        if not math.isclose(got, wanted, rel_tol=self._tolerance, abs_tol=0.0):
            raise Broken("I1", f"step {step}: {name} is {got!r}, the plain loop has {wanted!r}")

    def ended(self, run: str) -> None:
        state = self.world.broker.ended[run]
        of_rounds = self.world.broker.machine.runs[b.RunId(run)].has_rounds
        if state.phase == broker_pb2.DONE and not of_rounds and self._done(run) != state.steps:
            raise Broken("I2", f"{run} is done after {self._done(run)} of {state.steps} steps")
        if state.phase != broker_pb2.DONE and not state.reason.text:
            raise Broken("I9", f"{run} ended as {broker_pb2.Phase.Name(state.phase)}, without why")


def _check_routes(flow: Flow) -> None:
    """Every visit of every route is in its peer's list exactly once, forward and backward, and so
    is one update of every peer."""
    lists = {peer: Counter(flow.actions(peer)) for peer in flow.plan.peers}
    apart = {peer: halved(actions) for peer, actions in lists.items()}
    wanted: dict[PeerId, Counter[Action]] = {peer: Counter() for peer in flow.plan.peers}
    for m, route in enumerate(flow.plan.routes):
        for visit in route:
            has_backward = flow.stages[visit.stage].has_backward
            for kind in training_visits(has_backward, visit.stage in apart[visit.peer]):
                wanted[visit.peer][Action(kind, m, visit.stage)] += 1
    for peer, visits in wanted.items():
        visits[Action(Kind.UPDATE)] += 1
        found = Counter(
            {a: n for a, n in lists[peer].items() if TRAITS[a.kind].trains or a.kind is Kind.UPDATE}
        )
        if found != visits:
            odd = next(iter((found - visits) + (visits - found)))
            raise Broken(
                "I2", f"{peer} has {odd} {found[odd]} times in its list, its routes {visits[odd]}"
            )
