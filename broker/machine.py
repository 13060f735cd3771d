"""The broker's decisions: `handle(event, now) -> instructions`, without sockets, clock or threads.

Rules.

- Nothing happens outside of an event. The same events at the same times give the same instructions,
  byte for byte (I6); only dictionaries and lists are iterated over, in order of insertion.
- Membership knows peers (`membership.py`), a Run knows itself (`runs.py`), and they meet only here:
  a lost member ends its run; an ended run gives its members back; the pool is offered to the runs
  that wait (`waiting.py`).
- One plan is made at a time, so that no peer is promised twice. MakePlan carries a version; an
  answer with another version is dropped. An answer whose peers are not all free any more is stale:
  it is dropped too and asked for again.
- Whoever speaks nonsense on a stream loses that stream, and nobody else notices.
- Every client request is answered once, in the same call.
- After DrainAsked nothing new starts; Stop comes when nothing is active. StopAsked ends everything.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from ..dag.plan import PeerId, PlanError
from ..proto.broker_pb2 import (
    BrokerMessage,
    Description,
    PeerMessage,
    PeerState,
    Refused,
    Submitted,
)
from ..proto.common_pb2 import Reason
from .events import (
    Answer,
    CloseStream,
    DescribeAsked,
    DrainAsked,
    Event,
    Instruction,
    Log,
    MakePlan,
    PeerSaid,
    PlanFailed,
    PlanReady,
    Reject,
    RequestId,
    RunCancelled,
    RunId,
    RunSubmitted,
    Stop,
    StopAsked,
    StreamClosed,
    StreamOpened,
    Tell,
    TimerFired,
    WatchAsked,
)
from .membership import Lost, Member, Membership, clean
from .options import BrokerOptions
from .runs import Run
from .waiting import Waits, consider, in_order, suited
from .wish import SpecError, read_spec

__all__ = ["MOST_MESSAGE_BYTES", "BrokerMachine"]

MOST_MESSAGE_BYTES = 64 * 1024
"""Longest message of a peer: none carries more than names, numbers and one reason."""


class BrokerMachine:
    """members: who is here. runs: by id, in order of submission, the newest ended ones included.
    planning: the run whose MakePlan is not answered yet. ignored: messages without effect, by kind.
    """

    def __init__(self, broker_id: str, options: BrokerOptions | None = None) -> None:
        self.broker_id = broker_id
        self.options = options or BrokerOptions()
        self.members = Membership(broker_id, self.options)
        self.runs: dict[RunId, Run] = {}
        self.planning: RunId | None = None
        self.draining = False
        self.ignored: Counter[str] = Counter()
        self._submitted = 0
        self._versions = 0
        self._generations = 0
        self._placed: tuple[int, int] = (-1, -1)  # What `_place` saw last; see there.
        self._changes = 0

    def __repr__(self) -> str:
        peers, pool = len(self.members.members), len(self.members.pool)
        runs = sum(not run.ended for run in self.runs.values())
        return (
            f"<Broker {peers} peer{'' if peers == 1 else 's'} ({pool} in pool), "
            f"{runs} run{'' if runs == 1 else 's'}>"
        )

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What to do about an event. Never raises for anything that came from outside."""
        out = self._decide(event, now)
        out += self._place(now)
        for run in self.runs.values():
            out += run.arm()
        for instruction in out:
            if isinstance(instruction, Log) and instruction.name == "message_ignored":
                self.ignored[str(instruction.fields[0][1])] += 1
        if self.draining and not any(run.active for run in self.runs.values()):
            out.append(Stop("no run is active"))
        return out

    def _decide(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case StreamOpened(stream):
                return self.members.opened(stream, now)
            case PeerSaid(stream, message):
                return self._said(event, message, now) if stream in self.members.streams else []
            case StreamClosed(stream, why):
                return self._losing(*self.members.closed(stream, why), now)
            case RunSubmitted():
                return self._submit(event, now)
            case RunCancelled(request, run):
                return self._cancel(request, run, now)
            case DescribeAsked(request):
                return [Answer(request, self._describe(now))]
            case WatchAsked(request, run, start):
                if run not in self.runs:
                    return [self._unknown(request, run)]
                return [Answer(request, self.runs[run].watched(start))]
            case PlanReady():
                return self._planned(event, now)
            case PlanFailed():
                return self._unplanned(event, now)
            case TimerFired(name):
                return self._timer(name, now)
            case DrainAsked():
                self.draining = True
                self._changes += 1
                return [Log("broker_draining", (("runs", len(self.runs)),))]
            case StopAsked():
                return self._stop(now)

    # ------------------------------------------------------------ peers

    def _said(self, event: PeerSaid, message: PeerMessage, now: float) -> list[Instruction]:
        members, stream = self.members, event.stream
        kind = message.WhichOneof("kind")
        size = message.ByteSize()
        member = members.heard(stream, now)
        nonsense = ""
        if kind is None:
            nonsense = "a message of no known kind: is the peer of another version of shoal?"
        elif size > MOST_MESSAGE_BYTES:
            nonsense = f"a {kind} of {size} bytes: expected at most {MOST_MESSAGE_BYTES}"
        elif member is None and kind != "hello":
            nonsense = f"a {kind} before the Hello"
        elif member is not None and kind == "hello":
            nonsense = "a second Hello on one stream"
        if nonsense:
            if member is None:
                return members.refuse(stream, "protocol", nonsense)
            return self._losing(*members.expel(member, "protocol", f"it sent {nonsense}"), now)
        if member is None:
            return self._losing(*members.greeted(stream, message.hello, now), now)
        return self._member_said(member, message, now)

    def _member_said(self, member: Member, message: PeerMessage, now: float) -> list[Instruction]:
        kind = message.WhichOneof("kind")
        if kind == "heartbeat":
            return []
        if kind == "goodbye":
            why = message.goodbye.reason.text
            return self._losing(*self.members.goodbye(member, why), now)
        about = getattr(message, str(kind)).run
        run = self.runs.get(RunId(about))
        if run is None:
            text = f"the run {clean(about, 60)!r} is not known"
            fields = (("message", str(kind)), ("peer", member.id), ("why", text))
            return [Log("message_ignored", fields)]
        if kind == "drained":
            if self.members.drained(member, about):
                return [Log("peer_free", (("peer", member.id), ("run", about)))]
            text = f"the peer is {member.state} for {member.run or 'no run'}"
            return [Log("message_ignored", (("message", kind), ("peer", member.id), ("why", text)))]
        if kind == "ready":
            return run.ready(member, message.ready, self.members, now)
        if kind == "step":
            return run.reported(member, message.step, self.members, now)
        if kind == "exported":
            return run.exported(member, message.exported, self.members, now)
        assert kind == "fault", kind
        return run.fault(member, message.fault, self.members, now)

    def _losing(
        self, out: list[Instruction], lost: Sequence[Lost], now: float
    ) -> list[Instruction]:
        """Instructions about members that are gone, and what that means for their runs."""
        out = list(out)
        for gone in lost:
            run = self.runs.get(gone.member.run) if gone.member.run else None
            if run is not None and gone.member.state == "assigned":
                out += run.lost(gone, self.members, now)
        return out

    def _timer(self, name: str, now: float) -> list[Instruction]:
        kind, _, who = name.partition(":")
        if kind == "run" and RunId(who) in self.runs:
            return self.runs[RunId(who)].timer(self.members, now)
        return self._losing(*self.members.timer(name, now), now)

    # ------------------------------------------------------------ clients

    def _submit(self, event: RunSubmitted, now: float) -> list[Instruction]:
        if self.draining:
            text = "the broker is leaving and starts nothing new: submit to it when it is back"
            return [Reject(event.request, "UNAVAILABLE", text)]
        open_runs = sum(not run.ended for run in self.runs.values())
        if open_runs >= self.options.most_waiting:
            text = f"{open_runs} runs have not ended, the limit: try again when some have"
            return [Reject(event.request, "RESOURCE_EXHAUSTED", text)]
        try:
            wish = read_spec(event.spec)
        except SpecError as error:
            return [Reject(event.request, "INVALID_ARGUMENT", str(error))]
        run_id = self._new_id()
        self._submitted += 1
        run = Run(run_id, self._submitted, event.spec, wish, self.options)
        self.runs[run_id] = run
        self._changes += 1
        self._forget_old_runs()
        fields = (("run", run_id), ("name", event.spec.name), ("steps", event.spec.steps))
        return [Log("run_submitted", fields), Answer(event.request, Submitted(run=run_id))]

    def _new_id(self) -> RunId:
        # Differs between brokers and between starts of one, so that output folders do not collide.
        digest = hashlib.sha256(f"{self.broker_id}/{self._submitted}".encode()).hexdigest()
        length = next(n for n in range(4, 65) if f"r-{digest[:n]}" not in self.runs)
        return RunId(f"r-{digest[:length]}")

    def _forget_old_runs(self) -> None:
        ended = [run.id for run in self.runs.values() if run.ended]
        for run in ended[: max(0, len(ended) - self.options.kept_runs)]:
            del self.runs[run]

    def _cancel(self, request: RequestId, run_id: RunId, now: float) -> list[Instruction]:
        run = self.runs.get(run_id)
        if run is None:
            return [self._unknown(request, run_id)]
        out: list[Instruction] = []
        if not run.ended:
            out += run.cancel(self.members, now)
            self._closed(run)
        return [*out, Answer(request, run.state)]

    def _unknown(self, request: RequestId, run: str) -> Reject:
        known = ", ".join(list(self.runs)[-5:]) or "none"
        text = f"no run {clean(run, 60)!r} here; the newest runs: {known}"
        return Reject(request, "NOT_FOUND", text)

    def _describe(self, now: float) -> Description:
        return Description(
            broker=self.broker_id,
            peers=[
                PeerState(
                    peer=m.id,
                    profile=m.profile,
                    address=m.address,
                    run=m.run or "",
                    silent_s=max(0.0, now - m.heard_at),
                    membership=m.state,
                )
                for m in self.members.members.values()
            ],
            runs=[run.state for run in self.runs.values()],
        )

    def _stop(self, now: float) -> list[Instruction]:
        self.draining = True
        text = "the broker is leaving"
        out: list[Instruction] = []
        for run in self.runs.values():
            if not run.ended:
                out += run.fail(
                    "broker", f"{text}: submit the run again when it is back", self.members, now
                )
                self._closed(run)
        refused = Refused(reason=Reason(code="leaving", text=text), again=True)
        for stream in list(self.members.streams):
            out += [Tell(stream, BrokerMessage(refused=refused)), CloseStream(stream, text)]
        return out

    # ------------------------------------------------------------ planning

    def _place(self, now: float) -> list[Instruction]:
        """Asks for the next plan, and shows every waiting run why it waits."""
        seen = (self.members.version, self._changes)
        if seen == self._placed:
            return []
        self._placed = seen
        out: list[Instruction] = []
        ahead: Run | None = None  # A run that nobody behind it may overtake.
        for run in in_order(r for r in self.runs.values() if not r.ended and not r.active):
            if self.draining:
                out += run.waits("broker", "the broker is leaving and starts nothing new", now)
            elif run.id == self.planning:
                ahead = ahead or run
            elif ahead is not None:
                text = f"waits behind run {ahead.id} (priority {ahead.wish.priority})"
                out += run.waits("queue", text, now)
            elif isinstance(verdict := consider(run, self.members), Waits):
                out += run.waits(verdict.code, verdict.reason, now)
                ahead = run if verdict.blocks else None
            elif self.planning is not None:
                out += run.waits("queue", f"waits for the plan of run {self.planning}", now)
                ahead = run
            else:
                out += self._ask(run, verdict.members, now)
                ahead = run
        return out

    def _ask(self, run: Run, members: Sequence[Member], now: float) -> list[Instruction]:
        self._versions += 1
        self.planning, run.asked = run.id, self._versions
        run.offered = {m.id: (m.boot, m.counter) for m in members}
        text = f"is planned over {len(members)} peer{'' if len(members) == 1 else 's'}"
        out = run.waits("planning", text, now)
        offers = tuple(m.offer for m in members)
        return [*out, MakePlan(run.id, self._versions, run.spec, offers)]

    def _answered(self, event: PlanReady | PlanFailed) -> Run | None:
        """The run that this answers, no longer asked for; None for an answer nobody waits for."""
        run = self.runs.get(event.run)
        if run is None or run.id != self.planning or run.asked != event.version:
            return None
        self.planning, run.asked = None, None
        self._changes += 1
        return run

    def _planned(self, event: PlanReady, now: float) -> list[Instruction]:
        run = self._answered(event)
        if run is None:
            return [_dropped(event, "nobody waits for it")]
        if self.draining:
            return [_dropped(event, "the broker is leaving")]
        plan = event.plan
        gone = [p for p in plan.peers if not self._still_free(run, p)]
        foreign = [p for p in gone if p not in run.offered]
        pairs = event.pairs or tuple(
            (a, b) for i, a in enumerate(plan.peers) for b in plan.peers[i + 1 :]
        )
        problem = f"the plan names peers that were not offered: {foreign}" if foreign else ""
        problem = problem or _bad_plan(event, pairs)
        if problem:
            return run.fail("plan", f"the plan cannot be used: {problem}", self.members, now)
        if gone:
            # `_place` runs behind every event and asks again over the peers that are there now.
            return [_dropped(event, f"{', '.join(gone)} left the pool meanwhile")]
        mute = [
            f"{a} and {b}"
            for a, b in pairs
            if not (self.members.members[a].address or self.members.members[b].address)
        ]
        if mute:
            text = (
                f"no side of {mute[0]} can be dialled: neither announced an address, and relays "
                "are not built yet"
            )
            return run.fail("address", text, self.members, now)
        first = self._generations + 1
        self._generations += len(pairs)
        fields = (("run", run.id), ("stages", len(plan.stages)), ("why", "; ".join(plan.reasons)))
        return [
            Log("run_planned", fields),
            *run.waiting_to_building(plan, pairs, self.members, first, now),
        ]

    def _still_free(self, run: Run, peer: PeerId) -> bool:
        member = self.members.members.get(peer)
        if member is None or member.state != "pool":
            return False
        return run.offered.get(peer) == (member.boot, member.counter)

    def _unplanned(self, event: PlanFailed, now: float) -> list[Instruction]:
        run = self._answered(event)
        if run is None:
            return [_dropped(event, "nobody waits for it")]
        others = [m for m in suited(run, self.members) if m.id not in run.offered]
        busy = sum(m.state != "pool" for m in others)
        if event.code not in ("peers", "memory") or run.wish.wanted or not others:
            return run.fail(event.code, event.reason, self.members, now)
        # More peers are here than were offered. Those that joined meanwhile are asked for at once;
        # while all of them work, the pool must change first.
        if busy == len(others):
            self._placed = (self.members.version, self._changes)
        text = f"{event.reason}; {busy} more peers work for other runs"
        return run.waits(event.code, text, now)

    def _closed(self, run: Run) -> None:
        """A waiting or planned run ended."""
        self._changes += 1
        if self.planning == run.id:
            self.planning = None


def _bad_plan(event: PlanReady, pairs: Sequence[tuple[PeerId, PeerId]]) -> str:
    plan = event.plan
    try:
        plan.validate(plan.stages[-1].stop if plan.stages else 0)
    except PlanError as error:
        return str(error)
    peers = plan.peers
    if any(a == b or a not in peers or b not in peers for a, b in pairs):
        return "it names links between peers that hold no stage"
    if len({frozenset(pair) for pair in pairs}) != len(pairs):
        return "it names a link twice"
    return ""


def _dropped(event: PlanReady | PlanFailed, why: str) -> Log:
    fields = (("message", "plan"), ("run", event.run), ("version", event.version), ("why", why))
    return Log("message_ignored", fields)
