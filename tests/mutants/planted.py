"""Planted bugs: each a small change to the real classes while a world runs.

Every one is a mistake that somebody could make in a day. `MUTANTS` says what each does, which
invariant the monitor must find broken, and what has to happen in the world to bring it out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from shoal.broker.events import Persist
from shoal.broker.machine import BrokerMachine
from shoal.broker.records.run import RunRecord
from shoal.broker.records.steps import StepLedger
from shoal.broker.runs.lifecycle import Lifecycle
from shoal.broker.runs.losses import Losses
from shoal.compression.stateful.feedback import Feedback
from shoal.dag.exchange import engine
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.schedule.schedule import Action, Kind
from shoal.net.links.inbox import Inbox
from shoal.net.links.messages import Ack
from shoal.net.links.outbox import Outbox
from shoal.net.transports.memory import _Dialler
from shoal.peer.compute.exchange import _Scores
from shoal.peer.compute.inputs import CheckedReader
from shoal.peer.core.assignment import Assignment
from shoal.peer.core.attachment import Attachment
from shoal.peer.core.peer_program import PeerProgram
from shoal.peer.core.reports import Reports
from shoal.peer.core.step import Steps
from shoal.peer.sync.strategy import Strategy

AT = 1
"""The step in which most of them strike."""


@dataclass(frozen=True)
class Mutant:
    """`invariants`: those that the monitor may name. `brings`: what must happen besides training:
    "old frame", "old report", "cut", "death", "pieces" (frames in several messages), "feedback",
    "restart" (of the broker)."""

    name: str
    plant: Callable[[], Any]
    invariants: tuple[str, ...]
    brings: str = ""


MUTANTS: list[Mutant] = []


def mutant(name: str, *invariants: str, brings: str = "") -> Callable[[Any], Any]:
    def register(plant: Callable[[], Iterator[None]]) -> Callable[[], Any]:
        made = contextmanager(plant)
        MUTANTS.append(Mutant(name, made, invariants, brings))
        return made

    return register


# -------------------------------------------------------------------- terms


@mutant("a peer accepts frames of an older term", "I3", brings="old frame")
def stale_frame() -> Iterator[None]:
    with patch.object(Assignment, "matches", lambda self, run, term: self.run == run):
        yield


@mutant("the broker accepts reports of an older term", "I3", brings="old report")
def stale_report() -> Iterator[None]:
    stale = Lifecycle.stale

    def lenient(self: Lifecycle, what: str, member: Any, term: int, *phases: Any) -> Any:
        return stale(self, what, member, self.record.term, *phases)

    with patch.object(Lifecycle, "stale", lenient):
        yield


# -------------------------------------------------------------------- the journal


@mutant("a decision is told before it is on disk", "I10")
def told_early() -> Iterator[None]:
    handle = BrokerMachine.handle

    def late(self: BrokerMachine, event: Any, now: float) -> Any:
        out = handle(self, event, now)
        return sorted(out, key=lambda i: isinstance(i, Persist))

    with patch.object(BrokerMachine, "handle", late):
        yield


@mutant("a step is not journaled", "I10")
def step_forgotten() -> Iterator[None]:
    publish = RunRecord.publish

    def forgets(self: RunRecord, event: Any, *args: Any) -> Any:
        out = publish(self, event, *args)
        if event.HasField("step") and event.step.step == AT:
            self._decisions.pop()
        return out

    with patch.object(RunRecord, "publish", forgets):
        yield


@mutant("reports are not told again to a broker that lacks them", "I9", brings="restart")
def reports_lost() -> Iterator[None]:
    with patch.object(Reports, "again", lambda self, step: []):
        yield


# -------------------------------------------------------------------- samples and updates


@mutant("a microbatch's gradient is added twice", "I1")
def applied_twice() -> Iterator[None]:
    backward = StageExecutor.backward

    def twice(self: StageExecutor, step: int, m: int, *args: Any) -> Any:
        before = {n: None if p.grad is None else p.grad.clone() for n, p in _parameters(self)}
        found = backward(self, step, m, *args)
        if (step, m) == (AT, 1):
            for name, p in _parameters(self):
                if p.grad is not None:
                    p.grad += p.grad - (0.0 if before[name] is None else before[name])
        return found

    with patch.object(StageExecutor, "backward", twice):
        yield


@mutant("the gradient of one route is lost", "I1")
def route_lost() -> Iterator[None]:
    backward = StageExecutor.backward

    def forgets(self: StageExecutor, step: int, m: int, *args: Any) -> Any:
        before = {n: None if p.grad is None else p.grad.clone() for n, p in _parameters(self)}
        found = backward(self, step, m, *args)
        if (step, m) == (AT, 2):
            for name, p in _parameters(self):
                p.grad = before[name]
        return found

    with patch.object(StageExecutor, "backward", forgets):
        yield


@mutant("a sample is read in two steps, and another in none", "I1")
def sample_twice() -> Iterator[None]:
    train = CheckedReader.train

    def again(self: CheckedReader, step: int, m: int, *args: Any) -> Any:
        return train(self, AT - 1 if (step, m) == (AT, 3) else step, m, *args)

    with patch.object(CheckedReader, "train", again):
        yield


@mutant("the update is made twice in a step", "I2")
def updated_twice() -> Iterator[None]:
    of = PeerProgram.of

    def longer(flow: Any, peer: Any, actions: tuple[Action, ...]) -> PeerProgram:
        return of(flow, peer, (*actions, *(a for a in actions if a.kind is Kind.UPDATE)))

    with patch.object(PeerProgram, "of", staticmethod(longer)):
        yield


@mutant("a peer takes a visit of another one's route", "I4")
def foreign_visit() -> Iterator[None]:
    of = PeerProgram.of

    def more(flow: Any, peer: Any, actions: tuple[Action, ...]) -> PeerProgram:
        visits = [
            Action(Kind.FORWARD, m, visit.stage)
            for m, route in enumerate(flow.plan.routes)
            for visit in route
            if visit.peer != peer and peer in flow.plan.stages[visit.stage].holders
        ]
        return of(flow, peer, (*visits[:1], *actions) if actions else actions)

    with patch.object(PeerProgram, "of", staticmethod(more)):
        yield


@mutant("a step is committed when one report is still missing", "I2")
def committed_early() -> Iterator[None]:
    due = StepLedger.due

    def early(self: StepLedger, now: float) -> Any:
        reports = self._reports.get(self.committed, {})
        missing = [p for p in self.peers if p not in reports]
        if self.committed == AT and len(missing) == 1:
            reports[missing[0]] = next(iter(reports.values()))
        return due(self, now)

    with patch.object(StepLedger, "due", early):
        yield


@mutant("a frame is matched without its port", "I2")
def without_port() -> Iterator[None]:
    def complete(self: Steps) -> bool:
        here = {key._replace(port="") for key in self.arrived}
        takes = self.program.takes[self.position]
        return all(self.key(t)._replace(port="") in here for t in takes)

    with patch.object(Steps, "complete", complete):
        yield


# -------------------------------------------------------------------- exchanges


@mutant("a tied gradient is added twice", "I1")
def tied_twice() -> Iterator[None]:
    pass_on = engine.pass_on

    def once_more(taken: Any, space: Any) -> Any:
        tied = any(hop.part for hop, _ in taken) and not isinstance(space, _Scores)
        if tied:
            hop, value = taken[0]
            taken = [*taken, (hop._replace(weight=2), value)]
        return pass_on(taken, space)

    with patch.object(engine, "pass_on", once_more):
        yield


@mutant("the norm leaves one stage's gradients out", "I1")
def norm_short() -> Iterator[None]:
    square = Strategy.square

    def fewer(self: Strategy, names: Any) -> Any:
        return square(self, list(names)[1:])

    with patch.object(Strategy, "square", fewer):
        yield


@mutant("the residual is forgotten in the middle of a run", "I5", brings="feedback")
def residual_reset() -> Iterator[None]:
    residual, calls = Feedback._residual, [0]

    def forgets(self: Feedback, spec: Any, state: Any) -> Any:
        calls[0] += bool(state)
        return None if calls[0] == 2 else residual(self, spec, state)

    with patch.object(Feedback, "_residual", forgets):
        yield


# -------------------------------------------------------------------- links


@mutant("a slot's credit is given twice", "I8")
def credit_twice() -> Iterator[None]:
    release = Inbox.release

    def generous(self: Inbox, key: Any) -> Any:
        if key in self._held:
            self._slots[key.role].taken -= 1
        return release(self, key)

    with patch.object(Inbox, "release", generous):
        yield


@mutant("a frame is acknowledged before it arrived", "I8", brings="pieces")
def early_ack() -> Iterator[None]:
    announce = Inbox.announce

    def eager(self: Inbox, header: Any, first: Any = None) -> Any:
        arrived, answers = announce(self, header, first)
        return arrived, answers or [Ack(header.number)]

    with patch.object(Inbox, "announce", eager):
        yield


@mutant("a broken link is never dialled again", "I9", brings="cut")
def no_redial() -> Iterator[None]:
    with patch.object(_Dialler, "_again", lambda self, connection: None):
        yield


@mutant("what waits while a link is down is forgotten", "I9", brings="cut")
def forgotten_queue() -> Iterator[None]:
    resume = Outbox.resume

    def forgets(self: Outbox, hello: Any) -> Any:
        done = resume(self, hello)
        for lane in self._lanes.values():
            for frame in lane.queue:
                self._keys.remove(frame.key)
                self._unacknowledged.pop(frame.number, None)
            lane.queue.clear()
        self.waiting.clear()
        return done

    with patch.object(Outbox, "resume", forgets):
        yield


# -------------------------------------------------------------------- losses of peers


@mutant("the broker does not notice that a holder is gone", "own", "I9", brings="death")
def loss_ignored() -> Iterator[None]:
    with patch.object(Losses, "lost", lambda self, lost, now: []):
        yield


# -------------------------------------------------------------------- of two worlds


@contextmanager
def own_clock() -> Iterator[None]:
    """I6: a machine that takes a number from outside. No single world shows it."""
    heartbeat, own = Attachment.heartbeat, random.Random(1)

    def whenever(self: Attachment, part: Any, now: float) -> Any:
        self.heartbeat_s = 0.1 + 0.1 * own.random()
        return heartbeat(self, part, now)

    with patch.object(Attachment, "heartbeat", whenever):
        yield


def _parameters(executor: StageExecutor) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in executor.parameters.items() if p.requires_grad]
