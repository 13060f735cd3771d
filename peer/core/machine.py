"""The peer's machine: facts in, instructions out. No I/O, no clock, no threads, no torch.

Membership (`attachment.py`):
- A broker that refuses it with `again` counts as a failed connection; without it the process ends
  (code 4): most often a newer process with the same id took over. Code 3: it gave up.
- Without the broker a run goes on, up to `reports` steps that the broker does not have
  (`reports.py`). Its Hello then says what it still holds. A broker that was started again lets it
  go on, and is told what it lacks; any other wants it to leave.

Runs (`assignment.py`, `step.py`):
- One assignment at a time. An Assign with a newer term of the same run replaces it; while another
  run is active a new run is refused ("busy"). Messages, answers and frames of an older term, or of
  a run that it does not hold, have no effect (I3); such frames are freed and counted.
- Links are measured by probes when the broker asks (`probe.py`), which an Assign ends first, and by
  the frames of a run (`traffic.py`). Such reports are not kept while the broker is away.
- Leave discards the run and is answered with Drained. Snapshots stay when the run goes on.

The end (`drain.py`): it says Goodbye and exits with 0. The owner's second stop, or one with nothing
running, at once. Closed by its owner it leaves a run in the same way, and attaches again: it stays
a member, which is given nothing. Opened again before that, it stays in the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Role
from ...net.links.frame import FrameKey
from ...proto import broker_pb2, common_pb2
from . import events as e
from .assignment import Assignment
from .attachment import WELCOME_S, Attachment
from .drain import Drain
from .keeping.snapshot_manager import SnapshotManager
from .options import PeerOptions
from .part_events import OF_PART, answered, grown, refused, timed
from .rates.probe import Probes
from .rates.traffic import Traffic
from .snapshots import BLOCKS

__all__ = ["PROTOCOL_VERSION", "PeerMachine"]

PROTOCOL_VERSION = 3
_RUNS_REMEMBERED = 64


class PeerMachine:
    """One peer. Call `handle` with each event in the order in which the events happened."""

    def __init__(
        self,
        peer: PeerId,
        boot: str,
        profile: broker_pb2.Profile,
        *,
        counter: int = 0,
        address: str = "",
        options: PeerOptions | None = None,
        snapshots: Iterable[tuple[broker_pb2.Snapshot, int]] = (),
    ) -> None:
        """`snapshots`: what an earlier process left on this host, with the number of parts."""
        self.peer = peer
        self.options = options or PeerOptions()
        self.assignment: Assignment | None = None
        """What it takes part in; None in the pool. Stays in phase FAILED until the Leave."""
        self.keeping = SnapshotManager(peer, snapshots, profile.host_memory_bytes)
        """Snapshots that lie here."""
        self.probes = Probes(peer)
        """Links that the broker wants measured now."""
        self.exit: e.Exit | None = None
        """Set once; nothing is done after it."""
        self.late_frames = 0
        """Frames of another run or term, or late or doubled ones."""
        hello = broker_pb2.Hello(
            version=PROTOCOL_VERSION,
            peer=peer,
            boot=boot,
            counter=counter,
            profile=profile,
            address=address,
        )
        self.attachment = Attachment(hello, self.options)
        self.drain = Drain(self.options)
        self._traffic = Traffic()
        self._memory_bytes = profile.device_memory_bytes
        self._terms: dict[str, int] = {}  # highest term seen of the latest runs, oldest first

    # ------------------------------------------------------------ events

    def handle(self, event: e.Event, now: float) -> list[e.Instruction]:
        """What the event leads to. `now` is any steady clock, seconds, the same for all calls."""
        if self.exit is not None:
            return []
        out = self._dispatch(event, now)
        if out and self.attachment.away:
            # An assignment keeps what the broker must know; the rest is old news when it is back.
            out = [i for i in out if not isinstance(i, e.Tell) or i.message.HasField("hello")]
        return out

    def _dispatch(self, event: e.Event, now: float) -> list[e.Instruction]:
        # Those of every frame and action come first.
        if isinstance(event, e.FrameEvent):
            return self._of_frame(event, event.key, now)
        if isinstance(event, e.Computed):
            return self._unless_it_leaves(self._answer(event, now))
        away = self.attachment.away
        match event:
            case e.Started():
                self.attachment.began(now)
                return self.attachment.connect()
            case e.Attached():
                closed = self.drain.closed
                return self.attachment.greet(self.assignment, self.keeping, closed, now)
            case e.Detached(why):
                # While waiting, it is the end of a stream that was given up already.
                return [] if self.attachment.state == "waiting" else self._detached(why, now)
            case e.BrokerSaid(message):
                return self._broker_said(message, now)
            case e.StopAsked(at_once):
                out = self.drain.stop_asked(self.assignment, now, at_once=at_once, away=away)
                return out + self._leave_if_due()
            case e.OwnerLooked():
                out = self.drain.owner_looked(event, self.assignment, now, away=away)
                return out + self._leave_if_due() if out else []
            case e.SpeedsMeasured(speeds):
                return self.attachment.measured(speeds)
            case e.TimerFired(name):
                return self._timer(name, now)
            case e.SnapshotTaken():
                out = self.keeping.taken(event)
            case e.SnapshotFailed(snapshot, why):
                out = self.keeping.failed(snapshot, why)
                part = self.assignment
                if snapshot.term == BLOCKS and part and part.alive:  # somebody waits for it
                    out += part.fail("neighbour", f"{self.peer} could not give its blocks: {why}")
            case e.SnapshotSaved():
                out = self.keeping.saved(event)
            case e.FrameGrows(key):
                return grown(self.assignment, key, now)
            case e.LinkUp(peer, again_bytes):
                if self.assignment:
                    self.assignment.sent_again(again_bytes)
                out = self.probes.link(peer, True, now)
                return out + (self.assignment.link(peer, True, now) if self.assignment else [])
            case e.LinkDown(peer, why):
                self._traffic.broke(peer)
                out = self.probes.link(peer, False, now, why)
                return out + (self.assignment.link(peer, False, now) if self.assignment else [])
            case _:
                out = self._answer(event, now)
        return self._unless_it_leaves(out)

    def _unless_it_leaves(self, out: list[e.Instruction]) -> list[e.Instruction]:
        if not self.drain.by:
            return out
        end = self._leave_if_due()
        if end:  # nothing new begins in the same breath in which it leaves
            out = [i for i in out if not isinstance(i, e.Compute | e.Prefetch)]
        return out + end

    def _answer(self, event: e.Answer, now: float) -> list[e.Instruction]:
        """Results of what this machine asked for; those of another term are dropped."""
        part = self.assignment
        if part is None or not part.matches(event.run, event.term):
            return []
        return answered(part, event, now, self.attachment.away)

    def _of_frame(self, event: e.FrameEvent, key: FrameKey, now: float) -> list[e.Instruction]:
        role = key.role
        if role is Role.PROBE:
            out = self.probes.frame(event, key, now)
            return out if isinstance(event, e.FrameRefused) else self._learn(out)
        part = self.assignment
        if part is not None and not part.takes(key):
            part = None
        if isinstance(event, e.FrameAcknowledged):
            out = self._traffic.acknowledged(key, event.began_s, now)
            if part is not None:
                out += part.frame_acknowledged(key, event.began_s, now)
            return out + self.keeping.acknowledged(key) if role is Role.SNAPSHOT else out
        if isinstance(event, e.FrameQueued):
            out = []
            if part is not None:
                out = part.frame_queued(key, event.size_bytes, now)
                self._traffic.queued(key, event.size_bytes, now)
        elif part is None:
            self.late_frames += 1
            out = self.keeping.stray(key) if role is Role.SNAPSHOT else [e.Release(key)]
        else:
            before = part.dropped
            if isinstance(event, e.FrameArrived):
                out = part.frame(key, now)
            else:
                out = part.frame_refused(key, event.why, now)
            self.late_frames += part.dropped - before
        return self._unless_it_leaves(out)

    def _learn(self, out: list[e.Instruction]) -> list[e.Instruction]:
        """The round trips of probes, for what training traffic tells later."""
        for item in out:
            if isinstance(item, e.Tell) and item.message.link.latency_s > 0:
                report = item.message.link
                self._traffic.know(PeerId(report.peer), 2 * report.latency_s)
        return out

    def _timer(self, name: str, now: float) -> list[e.Instruction]:
        part = self.assignment
        match name.partition(":"):
            case ("connect", _, _):
                return self.attachment.connect() if self.attachment.state == "waiting" else []
            case ("welcome", _, _):
                if self.attachment.state == "greeting":
                    return self._detached(f"no answer to Hello within {WELCOME_S:.0f} s", now)
            case ("heartbeat", _, _):
                return self.attachment.heartbeat(part, now)
            case ("drain", _, _):
                if self.drain.by == "closed":
                    return self._step_back()
                return self._go() if self.drain.by == "owner" else []
            case ("probe", _, peer):
                return self.probes.timer(PeerId(peer), now)
            case (of, _, peer) if part:
                return timed(part, of, peer, now, self.attachment.away)
        return []

    # ------------------------------------------------------------ membership

    def _detached(self, why: str, now: float) -> list[e.Instruction]:
        attachment = self.attachment
        attachment.detached(now)
        pause_s = attachment.pause_s(now, holds_run=self.assignment is not None)
        if pause_s is None:
            away, attempts = attachment.away_s(now), attachment.failures
            text = f"no broker for {away:.0f} s ({attempts} attempts), the last: {why}"
            return [*self._drop_assignment(), self._exit(3, text)]
        return [e.SetTimer("connect", now + pause_s)]

    def _broker_said(self, message: broker_pb2.BrokerMessage, now: float) -> list[e.Instruction]:
        kind = message.WhichOneof("kind")
        if kind == "welcome":
            return self._welcomed(message.welcome, now)
        if kind == "refused":
            reason = message.refused.reason
            text = f"the broker refused this peer ({reason.code}): {reason.text}"
            if message.refused.again:
                return self._detached(text, now)
            return [*self._drop_assignment(), self._exit(4, text)]
        if self.attachment.away:
            return []  # nothing else counts before the Welcome
        part = self.assignment
        match kind:
            case "assign":
                return self._assign(message.assign)
            case "leave":
                return self._leave(message.leave)
            case "drain":
                out = self.drain.broker_asked(self.assignment)
                return out + self._leave_if_due() if out else []
            case "probe":
                in_use = part.peers if part is not None and part.alive else None
                return self.probes.begin(message.probe, in_use, now)
            case "snapshot":
                order = message.snapshot
                out = self.keeping.ordered(order)
                if part is not None and part.matches(order.run, order.term):
                    out += part.snapshot_ordered(order, now)
                return out
            case "handover":
                return self._handover_told(message.handover, now)
        body: Any = getattr(message, kind or "", None)
        if kind in OF_PART and part is not None and part.matches(body.run, body.term):
            return OF_PART[kind](part, body, now)
        return []

    def _welcomed(self, welcome: broker_pb2.Welcome, now: float) -> list[e.Instruction]:
        self.attachment.welcomed(welcome)
        part, resumed = self.assignment, welcome.resumed
        out = self.attachment.heartbeat(part, now)
        if part is not None and (part.run, part.term) == (resumed.run, resumed.term):
            out += part.resumed(resumed.step, now)
        return out + self.attachment.untold(self.keeping)

    # ------------------------------------------------------------ assignments

    def _assign(self, assign: broker_pb2.Assign) -> list[e.Instruction]:
        part, last = self.assignment, self._terms.get(assign.run, -1)
        holds = any(self.peer in s.holders for s in assign.slice.plan.stages)
        again = assign.term == last and not holds and part is None  # a keeper, as it was before
        if assign.term <= last and not again:
            return []
        self._remember(assign.run, assign.term)
        memory, options = self._memory_bytes, self.options
        goes_on = self.drain.hands_over and part is not None and part.run == assign.run
        if self.drain.shut is not None and not goes_on:
            return self._step_back()
        if self.drain.by and not goes_on:
            return [refused(assign, "draining", f"{self.peer} is about to leave: no new run")]
        if part is not None and part.alive and part.run != assign.run:
            return [refused(assign, "busy", f"{self.peer} still holds {part.run}")]
        out = self.probes.end_all(f"{self.peer} was given a part in {assign.run}")
        live = assign.resume.live and holds and self.peer not in assign.resume.rebuilt
        codecs = not assign.resume.rebuilt  # they begin anew then
        if live and (part is None or not part.has(assign.first_step, codecs=codecs)):
            step = "nothing" if part is None or part.steps is None else part.steps.updates
            text = f"{self.peer} has other updates in its stages than {assign.first_step}: {step}"
            return [*out, *self._drop_assignment(), refused(assign, "live", text)]
        out += self._drop_assignment(keeps=live)
        self.assignment = new = Assignment(
            self.peer, assign, memory, options.patience, options.reports, self.keeping
        )
        return out + new.begin()

    def _leave(self, leave: broker_pb2.Leave) -> list[e.Instruction]:
        part = self.assignment
        out: list[e.Instruction] = []
        if part is not None and part.run == leave.run:
            if leave.term < part.term:
                return []
            out = self._drop_assignment()
        if not leave.goes_on:
            out += self.keeping.forget(leave.run)
        self._remember(leave.run, leave.term)
        drained = broker_pb2.Drained(run=leave.run)
        return [*out, e.Tell(broker_pb2.PeerMessage(drained=drained)), *self._leave_if_due()]

    def _drop_assignment(self, keeps: bool = False) -> list[e.Instruction]:
        """`keeps`: what is in the stages stays until the next one is built."""
        out = self.assignment.end() if self.assignment else []
        if keeps:
            out = [i for i in out if not isinstance(i, e.Discard)]
        self.assignment = None
        self._traffic.clear()
        return out

    def _remember(self, run: str, term: int) -> None:
        self._terms[run] = max(term, self._terms.pop(run, -1))
        if len(self._terms) > _RUNS_REMEMBERED:
            del self._terms[next(iter(self._terms))]

    # ------------------------------------------------------------ the end

    def _handover_told(self, reply: broker_pb2.HandoverReply, now: float) -> list[e.Instruction]:
        """What becomes of its part, which it is about to leave."""
        part = self.assignment
        if not self.drain.hands_over or part is None or not part.matches(reply.run, reply.term):
            return []
        return self.drain.told(reply, part, now) + self._leave_if_due()

    def _leave_if_due(self) -> list[e.Instruction]:
        """Ends a drain when what it waits for is over."""
        if self.exit is not None:
            return []
        match self.drain.due(self.assignment):
            case "for good":
                return self._go()
            case "the run":
                return self._step_back()
            case "":
                return []

    def _step_back(self) -> list[e.Instruction]:
        """Leaves the run and stays a member: the broker ends the stream, and it attaches again."""
        closed = self.drain.shut
        assert closed is not None
        self.drain.end()
        goodbye = broker_pb2.PeerMessage(goodbye=broker_pb2.Goodbye(reason=closed))
        return [*self._drop_assignment(), e.Tell(goodbye)]

    def _go(self) -> list[e.Instruction]:
        reason = common_pb2.Reason(code="stopped", text=self.drain.why)
        goodbye = broker_pb2.PeerMessage(goodbye=broker_pb2.Goodbye(reason=reason))
        self.assignment = None  # the process ends with it: frames on their way still leave
        return [e.Tell(goodbye), self._exit(0, self.drain.why)]

    def _exit(self, code: int, why: str) -> e.Exit:
        self.exit = e.Exit(code, why)
        return self.exit

    # ------------------------------------------------------------ for people and tests

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts the rules of this module."""
        self.attachment.validate()
        assert len(self._terms) <= _RUNS_REMEMBERED
        self.probes.validate()
        if self.assignment is not None:
            assert self._terms[self.assignment.run] == self.assignment.term
            assert len(self.assignment.reports) <= self.options.reports
            self.assignment.validate()
        assert self.exit is None or self.assignment is None, "it left and still holds a run"

    def __repr__(self) -> str:
        state = self.attachment.state if self.exit is None else f"exited {self.exit.code}"
        drain = f" draining ({self.drain.by})" if self.drain.by else ""
        what = repr(self.assignment) if self.assignment else "in the pool"
        return f"<Peer {self.peer} {state}{drain} {what}>"
