"""One holder's part in the rounds between replicas: decisions only.

    working --last step of the round--> taken down --its plan--> exchanging --all here--> applied
       ^                                                         ^    |                     |
       |                                                         +----+ another attempt     |
       +---------------------- the next round begins: what was applied is committed --------+

- No step begins before its round does (`RoundStart`). Behind the last one, what the stages moved
  since the last version is taken down (`CONTRIBUTE`), and the broker is told that it is ready.
- The broker says what is exchanged with whom (`RoundPlan`). Frames of it are taken from here on
  only; those of another attempt have no effect. Parts are added up as they come; the result of a
  part goes out when all have given theirs.
- When all results are here, they become the next version in the stages (`APPLY`), and the broker is
  told its hash. Contribution and old version stay until the broker commits the round, since another
  attempt may come in place of this one, without a member that was lost.
- With overlap, steps of the next round go on behind CONTRIBUTE (`RoundStart.ahead`), and what is
  made meanwhile stays beside the stages. Once it is committed it lands between two steps (`LAND`),
  the same two at every holder of the replica; there it is evaluated, too (`SHOW`).
- Of gossip some rounds may be told ahead (`ahead.py`). One of them begins here as soon as, at all
  holders of the replica, the version of the one before is made and nothing that they sent is on its
  way any more.
- Who has no version of its own to begin from (it came late, or was lost for too long) waits at the
  gate too, contributes nothing, and gets weights and shared state from those that have applied.
- A frame of an attempt that has not begun here keeps its place until it has.
- A peer that waits longer than the plan has patience says whom it waits for.

Pure: no I/O, no clock, no threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ...dag.plan.action import Action, Kind
from ...dag.plan.plan import PeerId
from ...dag.rounds.vector import RunVector, Span
from ...dag.rounds.wiring import (
    GIVE,
    MADE,
    RESULT,
    VERSION,
    Giver,
    RoundWiring,
    Share,
    VectorSegment,
    port_of,
    span_of,
    wiring,
)
from ...dag.schedule.flow import Role
from ...net.links.frame import FrameKey
from ...proto import broker_pb2, common_pb2
from . import events as e
from .ahead import Agreement, RoundsAhead

__all__ = ["Rounds", "run_of", "segments_of"]

_SLOTS = 4
"""Parts that may be here or on their way from one peer: 16 MB in fp32."""


def run_of(replica: str) -> str:
    """The run that a replica is of: frames between replicas have its id."""
    return replica.partition(".")[0]


def segments_of(plan: broker_pb2.RoundPlan) -> Iterator[VectorSegment]:
    for s in plan.segments:
        yield VectorSegment(
            (s.start, s.stop),
            PeerId(s.aggregator),
            tuple(Giver(PeerId(g.peer), g.weight) for g in s.givers),
            tuple(map(PeerId, s.takers)),
            tuple((PeerId(v.source), PeerId(v.destination)) for v in s.versions),
        )


class Rounds:
    """The rounds of one assignment. start: the round that it works in; None: it has no version to
    work from. late: frames without effect, so far."""

    def __init__(
        self,
        peer: PeerId,
        run: str,
        term: int,
        vector: RunVector,
        near: Collection[PeerId] = (),
        hub: PeerId | None = None,
    ) -> None:
        """`near`: peers of its own replica, whose links are there whatever rounds want. `hub`: the
        one of the replica that all of them have a link with; None: this one."""
        self.start: broker_pb2.RoundStart | None = None
        self.plan: broker_pb2.RoundPlan | None = None
        self.late = 0
        self.computing = False
        """Whether an action of a round runs on the device."""
        self._for = 0
        """The attempt that it is of."""
        self._peer, self._replica, self._term, self._vector = peer, run, term, vector
        self._near = frozenset(near)
        self._linked: dict[PeerId, broker_pb2.DialOrder | None] = {}
        """By counterpart, how it is dialled from here; None: it dials, or is near."""
        self._waits_since: float | None = None
        """When the gate closed; None: steps may be done."""
        self._busy_s = 0.0
        """What actions of the round took before."""
        self._taken_down = self._applied = self._begun = False
        """What was done in this round, and whether frames of the attempt are exchanged."""
        self._landed = True
        """Whether the version that the round began with is in the stages."""
        self._shown = False
        self._drift = 0.0
        self._sent_bytes = 0
        self._wiring = RoundWiring()
        self._lacks: dict[Span, set[PeerId]] = {}
        """By part that is added up here, whose contribution is missing."""
        self._awaited: set[Share] = set()
        """Results and versions that are to come."""
        self._unsent: set[FrameKey] = set()
        """Frames of the attempt that are not acknowledged."""
        self._early: dict[FrameKey, None] = {}
        """Frames that came of an attempt that has not begun here; each keeps its slot."""
        self._told: list[broker_pb2.RoundReport] = []
        """Reports that the broker may lack, should it be started again."""
        self._made = False
        """Whether the version of the attempt is, with all that it takes."""
        self._ahead = RoundsAhead(peer)
        self._agreement = Agreement(peer, hub or peer, near)
        self._lingers = frozenset[PeerId]()
        """With whom it exchanged the round before that: acknowledgements may be on their way."""

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Other replicas' peers that it has links with."""
        return tuple(p for p in self._linked if p not in self._near)

    @property
    def settled(self) -> bool:
        """Whether the stages have a version and steps since then, and nothing else."""
        return self._landed and not (self._taken_down or self._applied or self.computing)

    @property
    def landed(self) -> bool:
        """Whether the version that the round began with is in the stages."""
        return self._landed

    def lands_at(self, step: int) -> bool:
        """Whether the version that is still to land does so in front of this step."""
        start = self.start
        return start is not None and not self._landed and step >= start.first_step + start.late

    def stands_at(self, step: int, number: int) -> bool:
        """Whether the stages have the version of a round and the steps since then, in front of this
        one; so they do until the version of the next one is committed, or lands."""
        if self.start is None or self.computing or self.lands_at(step):
            return False
        if self._applied and self._wiring.gets:
            return False  # which takes the place of all that, if it is committed
        return number == self.start.round - (not self._landed)

    # ------------------------------------------------------------ rounds

    def begins(
        self, start: broker_pb2.RoundStart, *, by_itself: bool = False
    ) -> list[e.Instruction]:
        """The broker has committed what was applied, or hands out the first work; or the round was
        told ahead. Nothing when it says so again."""
        if self.start is not None and start.round <= self.start.round:
            return []
        self.start, self.plan = start, None
        self._taken_down = self._applied = self._begun = self._shown = self._made = False
        self._landed = not (start.late or (start.evaluate and start.apart))
        self._lingers = frozenset(self._wiring.counterparts if by_itself else ())
        if not by_itself:  # all that was before is on the broker's disk
            self._ahead.clear()
            self._told = []
        self._lacks, self._awaited, self._wiring = {}, set(), RoundWiring()
        self._sent_bytes = 0
        self._waits_since, self._busy_s = None, 0.0
        return [e.BeginRound(self._replica, self._term, start)]

    def between(self, step: int) -> list[e.Instruction]:
        """In front of a step: has the version land; behind the last one of the round, takes down
        what they came to. Each once."""
        start = self.start
        if self.computing or start is None:
            return []
        if not self._landed:
            if not self.lands_at(step):
                return []
            shows = start.evaluate and not self._shown
            self._shown = self._shown or shows
            return self._compute(Kind.SHOW if shows else Kind.LAND, start.round)
        if step >= start.first_step + start.steps and not self._taken_down:
            self._taken_down = True
            return self._compute(Kind.CONTRIBUTE, start.round)
        return []

    def waits(self, now: float) -> None:
        """The gate is closed: no step goes on here."""
        self._waits_since = now if self._waits_since is None else self._waits_since

    def exchanges(self) -> list[e.Instruction]:
        """What is next in the exchange; who takes the whole version does so at the gate."""
        if self.computing or (self.start is not None and not self._taken_down):
            return []
        if self._waits_since is None and self._wiring.gets:
            return []
        if self.plan is not None and not self._begun:
            return self._join()
        return self._apply_if_complete()

    def planned(self, plan: broker_pb2.RoundPlan, now: float) -> list[e.Instruction]:
        """What is exchanged, or is in place of an attempt."""
        known = (self.plan.round, self.plan.attempt) if self.plan is not None else (0, 0)
        behind = self.start is not None and plan.round < self.start.round
        if behind or (plan.round, plan.attempt) <= known:
            return []
        self.plan, self._begun = plan, False
        self._applied = self._made = False
        self._wiring = wiring(self._vector, segments_of(plan), self._peer, plan.fragment)
        self._unsent.clear()
        self._told = [r for r in self._told if not r.attempt or r.round < plan.round]
        if self._wiring.gets and self._waits_since is not None:
            self._waits_since = now
        timer = e.SetTimer("round", now + plan.patience_s)
        return [*self._link({PeerId(d.peer): d for d in plan.dials}), timer]

    def _link(self, dials: dict[PeerId, broker_pb2.DialOrder]) -> list[e.Instruction]:
        """Links stay from round to round, as long as they are wanted."""
        there = [p for p in self._wiring.counterparts if p != self._peer]
        later = self._ahead.dials
        later |= {p: self._linked[p] for p in self._lingers if p in self._linked}
        later |= dict.fromkeys(self._agreement.others if self._ahead.next is not None else ())
        wanted = {p: dials.get(p, later.get(p)) for p in (*there, *later)}
        wanted |= {p: None for p in wanted if p in self._near}
        out: list[e.Instruction] = []
        for peer in [p for p in self._linked if p not in wanted]:
            del self._linked[peer]
            out += [] if peer in self._near else [e.HangUp(peer)]
        for peer, dial in wanted.items():
            known = peer in self._linked and self._linked[peer] == dial
            self._linked[peer] = dial
            if not known and peer in self._near:
                out.append(e.Allow(peer, Role.ROUND, _SLOTS))
            elif not known:
                where = e.Dial(peer, dial.address, dial.generation) if dial else e.ExpectPeer(peer)
                out += [where, e.Allow(peer, Role.ROUND, _SLOTS)]
        return out

    def _join(self) -> list[e.Instruction]:
        assert self.plan is not None
        found, me = self._wiring, self._peer
        self._lacks = {
            part: {g.peer for g in givers if g.peer != me} for part, givers in found.adds.items()
        }
        self._awaited = {s for s in (*found.takes, *found.gets) if s.peer != me}
        join = e.JoinExchange(self._replica, self._term, self.plan)
        return [join, *self._compute(Kind.EXCHANGE, self.plan.round)]

    def _compute(self, kind: Kind, number: int) -> list[e.Instruction]:
        self.computing, self._for = True, self._attempt
        return [e.Compute(self._replica, self._term, number, Action(kind))]

    def computed(self, action: Action, result: e.Result, now: float) -> list[e.Instruction]:
        """An action of a round has ended."""
        self.computing = False
        found = result.round or e.RoundResult()
        self._busy_s += result.seconds if self._waits_since is None else 0.0
        if action.kind in (Kind.SHOW, Kind.LAND):
            self._landed = action.kind is Kind.LAND
            self._busy_s += 0.0 if self._waits_since is None else now - self._waits_since
            self._waits_since = None
            return []
        if self._for != self._attempt and action.kind is not Kind.CONTRIBUTE:
            return []  # another attempt has come meanwhile
        match action.kind:
            case Kind.CONTRIBUTE:
                self._drift = found.drift
                return [self._report(0, now, found)]
            case Kind.EXCHANGE:
                if found.code:
                    return [self._report(self._attempt, now, found)]
                patience = self.plan.patience_s if self.plan is not None else 0.0
                return [*self._exchange(), e.SetTimer("round", now + patience)]
            case Kind.APPLY:
                self._made = not found.code
                versions = [] if found.code else [self._key(VERSION, s) for s in self._wiring.sends]
                return [self._report(self._attempt, now, found), *self._send(versions)]
        raise AssertionError(f"{action} is none of a round")

    # ------------------------------------------------------------ rounds that were told ahead

    def told_ahead(self, ahead: broker_pb2.RoundAhead) -> list[e.Instruction]:
        """A later round, and whom it takes links with."""
        if not self._ahead.add(ahead, self.start):
            return []
        dials = self.plan.dials if self.plan is not None else ()
        return self._link({PeerId(d.peer): d for d in dials})

    @property
    def is_done(self) -> bool:
        """Whether nothing of this round is left to do here, and the next one is known."""
        return self._made and not self._unsent and self._ahead.next is not None

    def agrees(self) -> list[e.Instruction]:
        """Tells others of the replica that the round is done here, if it is; once."""
        if not self.is_done or self.plan is None:
            return []
        run, number, port = run_of(self._replica), self.plan.round, self._said_as
        to = self._agreement.says(number)
        keys = (FrameKey(run, 1, number, Role.ROUND, 0, MADE, port, self._peer, p) for p in to)
        return [e.SendFrame(key) for key in keys]

    @property
    def _said_as(self) -> str:
        return f"made:{self._term}"

    def next_ahead(self) -> broker_pb2.RoundAhead | None:
        """The round that begins now, without a word from the broker."""
        if not self.is_done or self.plan is None or not self._agreement.holds(self.plan.round):
            return None
        return self._ahead.next

    def goes_on(self, ahead: broker_pb2.RoundAhead, now: float) -> list[e.Instruction]:
        """A round that was told ahead has begun."""
        self._ahead.begun()
        return self.planned(ahead.plan, now)

    def held(self, order: int) -> list[e.Instruction]:
        """None begins by itself any more."""
        self._ahead.clear()
        number = self.start.round if self.start is not None else 0
        report = broker_pb2.RoundReport(
            run=self._replica, term=self._term, round=number, held=order
        )
        return [*self.again(), e.Tell(broker_pb2.PeerMessage(round=report))]

    def _exchange(self) -> list[e.Instruction]:
        """Frames of the attempt may come and go."""
        self._begun = True
        me = self._peer
        out = self._send(self._key(GIVE, s) for s in self._wiring.gives if s.peer != me)
        early, self._early = self._early, {}
        for key in early:
            out += self.arrived(key)
        for part in [p for p, lacks in self._lacks.items() if not lacks]:
            out += self._summed(part)
        return out

    def _summed(self, part: Span) -> list[e.Instruction]:
        del self._lacks[part]
        return self._send(self._key(RESULT, s) for s in self._wiring.results if s.part == part)

    def _send(self, keys: Iterable[FrameKey]) -> list[e.Instruction]:
        found = list(keys)
        self._unsent.update(found)
        return [e.SendFrame(key) for key in found]

    def _apply_if_complete(self) -> list[e.Instruction]:
        if not self._begun or self._applied or self._lacks or self._awaited or self.computing:
            return []
        assert self.plan is not None
        self._applied = True
        return self._compute(Kind.APPLY, self.plan.round)

    # ------------------------------------------------------------ frames

    def _key(self, hop: int, share: Share) -> FrameKey:
        return self._frame(hop, share.part, self._peer, share.peer)

    def _frame(self, hop: int, part: Span, source: PeerId, destination: PeerId) -> FrameKey:
        assert self.plan is not None
        run, port = run_of(self._replica), port_of(part)
        number, attempt = self.plan.round, self.plan.attempt
        return FrameKey(run, attempt, number, Role.ROUND, 0, hop, port, source, destination)

    def expects(self, key: FrameKey) -> bool:
        """Whether a frame is one of the present attempt that has not come yet."""
        plan = self.plan
        if plan is None or not self._begun or key.run != run_of(self._replica):
            return False
        if (key.step, key.term) != (plan.round, plan.attempt) or key.destination != self._peer:
            return False
        part, source = span_of(key.port), PeerId(key.source)
        if key.hop == GIVE:
            return source in self._lacks.get(part, ())
        known = self._wiring.takes if key.hop == RESULT else self._wiring.gets
        share = Share(part, source)
        return share in self._awaited and share in known

    def _is_early(self, key: FrameKey) -> bool:
        at = (key.step, key.term)
        if self.plan is None:
            return self.start is None or key.step >= self.start.round
        known = (self.plan.round, self.plan.attempt)
        return at > known or (at == known and not self._begun)

    def arrived(self, key: FrameKey) -> list[e.Instruction]:
        """A part came, and lies in its sum or its place."""
        if key.hop == MADE:
            if key.port == self._said_as:
                self._agreement.hears(key.step, PeerId(key.source))
            return [e.Release(key)]
        if not self.expects(key):
            if self._is_early(key):
                self._early[key] = None
                return []
            self.late += 1
            return [e.Release(key)]
        part, source = span_of(key.port), PeerId(key.source)
        out: list[e.Instruction] = [e.Release(key)]
        if key.hop == GIVE:
            self._lacks[part].remove(source)
            if not self._lacks[part]:
                out += self._summed(part)
        else:
            self._awaited.remove(Share(part, source))
        return out

    def refused(self, key: FrameKey, why: str, now: float) -> list[e.Instruction]:
        """A part came that cannot be taken, or could not be sent."""
        out: list[e.Instruction] = [e.Release(key)]
        if key.source == self._peer or not self.expects(key):
            return out
        result = e.RoundResult(code="refused", why=f"{key.port} of {key.source}: {why}")
        report = self._report(self._attempt, now, result)
        report.message.round.lacks.append(key.source)
        return [*out, report]

    def queued(self, size_bytes: int) -> None:
        self._sent_bytes += size_bytes

    def acknowledged(self, key: FrameKey) -> None:
        self._unsent.discard(key)

    # ------------------------------------------------------------ reports

    @property
    def _attempt(self) -> int:
        return self.plan.attempt if self.plan is not None else 0

    def _report(self, attempt: int, now: float, found: e.RoundResult) -> e.Tell:
        number = self.plan.round if self.plan is not None else self.start.round if self.start else 0
        report = broker_pb2.RoundReport(
            run=self._replica,
            term=self._term,
            round=number,
            attempt=attempt,
            hashes=found.hashes,
            drift=self._drift,
            sent_bytes=self._sent_bytes,
            waited_s=self._busy_s + now - (now if self._waits_since is None else self._waits_since),
        )
        if found.code:
            report.problem.CopyFrom(common_pb2.Reason(code=found.code, text=found.why[:2000]))
        self._told.append(report)
        return e.Tell(broker_pb2.PeerMessage(round=report))

    def evaluated(self, evaluation: broker_pb2.Evaluation | None) -> list[e.Instruction]:
        """The version that the round began from was evaluated; only the hub has what it came to."""
        if evaluation is None or self.start is None:
            return []
        report = broker_pb2.RoundReport(
            run=self._replica, term=self._term, round=self.start.round, evaluation=evaluation
        )
        self._told.append(report)
        return [e.Tell(broker_pb2.PeerMessage(round=report))]

    def again(self) -> list[e.Instruction]:
        """For a broker that was started again."""
        return [e.Tell(broker_pb2.PeerMessage(round=report)) for report in self._told]

    def timer(self, now: float) -> list[e.Instruction]:
        """The plan's patience is over."""
        if self.plan is None or self._applied or not self._begun:
            return []
        lacks = dict.fromkeys(p for missing in self._lacks.values() for p in sorted(missing))
        # Who adds up waits for somebody as well, so that it is not to blame for a sum that lacks.
        code = "late" if lacks else "unsummed"
        lacks = lacks or dict.fromkeys(share.peer for share in sorted(self._awaited))
        result = e.RoundResult(code=code, why=f"waits for {', '.join(lacks) or 'its device'}")
        report = self._report(self._attempt, now, result)
        report.message.round.lacks.extend(lacks)
        return [report]

    # ------------------------------------------------------------ the end

    def end(self) -> list[e.Instruction]:
        """The assignment ends."""
        gone = [e.HangUp(p) for p in self.peers]
        self._linked = {}
        return [*gone]
