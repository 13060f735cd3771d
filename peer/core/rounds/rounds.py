"""One holder's part in the rounds between replicas, and which of its steps they let go on:
decisions only.

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
- Where sums are masked, what came are masked sums. Who has them all, and the shares that others
  sealed for it, says so; it reveals the shares when the broker wants them, and applies the sums
  once it has the masks (`peer/secure/`). Meanwhile it waits for the broker alone.
- Sums of an attempt may be added up again by others once all have made the version: what was given
  goes to them as well, and who adds up says what came of it.
- Who has no version of its own to begin from (it came late, or was lost for too long) waits at the
  gate too, contributes nothing, and gets weights and shared state from those that have applied.
- A frame of an attempt that has not begun here keeps its place until it has.
- A peer to which nothing came for longer than the plan has patience says whom it waits for.

Pure: no I/O, no clock, no threads.
"""

from __future__ import annotations

from collections.abc import Collection

from ....dag.plan.action import Action, Kind
from ....dag.plan.plan import PeerId
from ....dag.rounds.vector import RunVector
from ....dag.rounds.wiring import AUDIT
from ....net.links.frame import FrameKey
from ....proto import broker_pb2, common_pb2
from .. import events as e
from ..step import Steps
from .round_exchange import RoundExchange

__all__ = ["Rounds"]


class Rounds:
    """The rounds of one assignment. start: the round that it works in; None: it has no version to
    work from. exchange: what comes and goes in it."""

    def __init__(
        self,
        peer: PeerId,
        run: str,
        term: int,
        vector: RunVector,
        steps: Steps,
        near: Collection[PeerId] = (),
    ) -> None:
        """`near`: peers of its own replica, whose links are there whatever rounds want."""
        self.start: broker_pb2.RoundStart | None = None
        self.computing = False
        """Whether an action of a round runs on the device."""
        self._for = 0
        """The attempt that it is of."""
        self._peer, self._replica, self._term, self._steps = peer, run, term, steps
        self.exchange = RoundExchange(peer, run, term, vector, near)
        self._waits_since: float | None = None
        """When the gate closed; None: steps may be done."""
        self._busy_s = 0.0
        """What actions of the round took before."""
        self._taken_down = self._applied = False
        """What was done in this round."""
        self._landed = True
        """Whether the version that the round began with is in the stages."""
        self._shown = False
        self._heard: list[broker_pb2.RoundMasks] = []
        """What the broker told of the masks of the attempt, and is to be done."""
        self._holds = self._unmasked = self._unsound = False
        """Whether it has told that it holds the masked sums, whether it has the masks, and whether
        it takes no part in the attempt, whose keys or shares are not as they should be."""
        self._contributed, self._local_s = e.RoundResult(), 0.0
        """What the last contribution came to, and what local work took."""
        self._told: list[broker_pb2.RoundReport] = []
        """Reports that the broker may lack, should it be started again."""

    @property
    def settled(self) -> bool:
        """Whether the stages have a version and steps since then, and nothing else."""
        return self._landed and not (self._taken_down or self._applied or self.computing)

    def _lands_at(self, step: int) -> bool:
        """Whether the version that is still to land does so in front of this step."""
        start = self.start
        return start is not None and not self._landed and step >= start.first_step + start.late

    def stands_at(self, step: int, number: int) -> bool:
        """Whether the stages have the version of a round and the steps since then, in front of this
        one; so they do until the version of the next one is committed, or lands."""
        if self.start is None or self.computing or self._lands_at(step):
            return False
        if self._applied and self.exchange.wiring.gets:
            return False  # which takes the place of all that, if it is committed
        return number == self.start.round - (not self._landed)

    # ------------------------------------------------------------ rounds

    def begins(self, start: broker_pb2.RoundStart) -> list[e.Instruction]:
        """The broker has committed what was applied, or hands out the first work. Nothing when it
        says so again."""
        if (before := self.start) is not None and start.round <= before.round:
            return self._goes_on(start) if _at(before) < _at(start) else []
        self.start = start
        self._taken_down = self._applied = self._shown = False
        self._landed = not (start.late or (start.evaluate and start.apart))
        self._forget_masks()
        self._told = []  # all that was before is on the broker's disk
        self.exchange.begin_round()
        self._waits_since, self._busy_s = None, 0.0
        return self._begun(start)

    def _begun(self, start: broker_pb2.RoundStart) -> list[e.Instruction]:
        """More steps may be done, unless the version is still to land."""
        steps = self._steps
        if self._landed:
            anew = steps.step == start.first_step
            self._open(start, evaluates=start.evaluate and anew)
            if _is_last(start) and not steps.evaluating:
                steps.end()
        return [e.BeginRound(self._replica, self._term, start)]

    def _open(self, start: broker_pb2.RoundStart, *, evaluates: bool = False) -> None:
        """Steps of the round may be done, and those that are ahead of the next one."""
        left = start.first_step + start.steps + start.ahead - self._steps.step
        self._steps.begin_round(max(0, left), evaluates=evaluates)

    def ready(self) -> list[e.Instruction]:
        """The device knows the samples of the steps that may be done. Those that are ahead have
        their data."""
        steps = self._steps
        if not self._landed or steps.over or steps.step >= steps.until:
            return []
        return [e.Prefetch(self._replica, self._term, steps.step)]

    def _goes_on(self, start: broker_pb2.RoundStart) -> list[e.Instruction]:
        """More clients are to be trained in the round, beside those that are taken down."""
        self.start, self._taken_down, self._waits_since = start, False, None
        self._told = [r for r in self._told if r.HasField("evaluation")]
        return self._begun(start)

    def goes_on(self, now: float) -> list[e.Instruction]:
        """Do what is to be done in front of the next action."""
        steps = self._steps
        if steps.waits and self._waits_since is None:
            self._waits_since = now
        if not steps.begun and not steps.evaluating and (out := self._between(steps.step)):
            return out
        return self._exchanges()

    def _between(self, step: int) -> list[e.Instruction]:
        """In front of a step: has the version land; behind the last one of the round, takes down
        what they came to. Each once."""
        start = self.start
        if self.computing or start is None:
            return []
        if not self._landed:
            if not self._lands_at(step):
                return []
            shows = start.evaluate and not self._shown
            self._shown = self._shown or shows
            return self._compute(Kind.SHOW if shows else Kind.LAND, start.round)
        if step >= start.first_step + start.steps and not self._taken_down:
            self._taken_down = True
            return self._compute(Kind.CONTRIBUTE, start.round)
        return []

    def _exchanges(self) -> list[e.Instruction]:
        """Go on with the exchange; who takes the whole version does so at the gate."""
        if self.computing or (self.start is not None and not self._taken_down):
            return []
        exchange = self.exchange
        if self._unsound or (self._waits_since is None and exchange.wiring.gets):
            return []
        if exchange.plan is not None and not exchange.begun:
            exchange.joins()
            join = e.JoinExchange(self._replica, self._term, exchange.plan, exchange.wiring)
            return [join, *self._compute(Kind.EXCHANGE, exchange.plan.round)]
        if exchange.plan is None or not exchange.complete:
            return []
        if self._heard:
            hear = e.HearMasks(self._replica, self._term, self._heard.pop(0))
            return [hear, *self._compute(Kind.UNMASK, exchange.plan.round)]
        masked = bool(exchange.plan.keys) and not self._unmasked
        if self._applied or masked:
            return []
        self._applied = True
        return self._compute(Kind.APPLY, exchange.plan.round)

    def planned(self, plan: broker_pb2.RoundPlan, now: float) -> list[e.Instruction]:
        """Take a plan of what is exchanged, in place of an earlier attempt."""
        exchange, before = self.exchange, self.exchange.plan
        known = (before.round, before.attempt) if before is not None else (0, 0)
        behind = self.start is not None and plan.round < self.start.round
        if behind or (plan.round, plan.attempt) <= known:
            return []
        exchange.planned(plan)
        self._forget_masks()
        self._applied = False
        self._told = [r for r in self._told if not r.attempt or r.round < plan.round]
        if exchange.wiring.gets and self._waits_since is not None:
            self._waits_since = now
        return [*exchange.link(), *exchange.waits_anew(now)]

    def hears(self, told: broker_pb2.RoundMasks) -> None:
        """What the broker tells of masks is done in its order, once the sums are here."""
        if self.exchange.is_at(told.round, told.attempt):
            self._heard.append(told)

    def asked(self, question: broker_pb2.RoundQuestion) -> list[e.Instruction]:
        """Show receipts of the attempt, if that is the one that a question is about."""
        if not self.exchange.is_at(question.round, question.attempt):
            return []
        return [e.ShowReceipts(self._replica, self._term, question)]

    def ordered(self, order: broker_pb2.RoundAudit, now: float) -> list[e.Instruction]:
        """Give what was given to others who add it up again, or do so, or both."""
        exchange, known = self.exchange, self.exchange.again
        if not exchange.is_at(order.round, order.attempt):
            return []
        if known is not None and order.turn <= known.order.turn:
            return known.added() if order.turn == known.order.turn else []
        again = exchange.ordered(order)
        return [
            *(*exchange.link(), *again.begins(), *exchange.shows(), *again.added()),
            *exchange.waits_anew(now),
        ]

    def _forget_masks(self) -> None:
        self._heard, self._holds, self._unmasked, self._unsound = [], False, False, False

    def _compute(self, kind: Kind, number: int) -> list[e.Instruction]:
        self.computing, self._for = True, self.exchange.attempt
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
            return self._landed_or_shown()
        exchange, attempt = self.exchange, self.exchange.attempt
        if self._for != attempt and action.kind is not Kind.CONTRIBUTE:
            return []  # another attempt has come meanwhile
        self._unsound = self._unsound or found.code == "masks"
        if found.code and action.kind in (Kind.EXCHANGE, Kind.APPLY):
            return [self._report(attempt, now, found)]
        match action.kind:
            case Kind.CONTRIBUTE:
                self._contributed = found
                self._local_s = result.seconds if found.losses else 0.0
                return [self._report(0, now, found)]
            case Kind.EXCHANGE:
                dealt = [] if found.masks is None else [self._report(attempt, now, found)]
                return [*dealt, *exchange.begins(), *exchange.waits_anew(now)]
            case Kind.UNMASK:
                self._holds = self._holds or found.masks is not None
                self._unmasked = self._unmasked or not (found.code or found.masks)
                return [self._report(attempt, now, found)] if found.code or found.masks else []
            case Kind.APPLY:
                return [*exchange.made(found), *self._tells_made(now)]
        raise AssertionError(f"{action} is none of a round")

    def _landed_or_shown(self) -> list[e.Instruction]:
        """The version is in the stages, to be evaluated or to stay."""
        assert self.start is not None, "a version lands, and no round has begun"
        if not self._landed:
            self._steps.begin_round(0, evaluates=True)
            return []
        self._open(self.start)
        return self.ready()

    # ------------------------------------------------------------ frames

    def arrived(self, key: FrameKey, now: float) -> list[e.Instruction]:
        """A part came, and lies in its sum or its place."""
        out, start = self.exchange.grows(key, now), self.start
        out += self.exchange.arrived(key, None if start is None else start.round)
        again = self.exchange.again if key.hop == AUDIT else None
        return out if again is None else [*out, *again.added()]

    def queued(self, key: FrameKey, size_bytes: int, now: float) -> list[e.Instruction]:
        """A frame is encoded; of no bytes: it could not be sent."""
        self.exchange.queued(key, size_bytes)
        return self._tells_made(now)

    def _tells_made(self, now: float) -> list[e.Instruction]:
        return [self._report(self.exchange.attempt, now, made) for made in self.exchange.tells()]

    def refused(self, key: FrameKey, why: str, now: float) -> list[e.Instruction]:
        """A part came that cannot be taken, or could not be sent."""
        out: list[e.Instruction] = [e.Release(key)]
        if key.source == self._peer:
            return [*out, *self.queued(key, 0, now)]
        if not self.exchange.expects(key) or key.hop == AUDIT:
            return out  # of an audit it lacks
        result = e.RoundResult(code="refused", why=f"{key.port} of {key.source}: {why}")
        report = self._report(self.exchange.attempt, now, result)
        report.message.round.lacks.append(key.source)
        return [*out, report]

    # ------------------------------------------------------------ reports

    @property
    def _number(self) -> int:
        """The round that is exchanged, or else worked in."""
        about = self.exchange.plan or self.start
        return about.round if about is not None else 0

    def _report(self, attempt: int, now: float, found: e.RoundResult) -> e.Tell:
        report = broker_pb2.RoundReport(
            run=self._replica,
            term=self._term,
            round=self._number,
            attempt=attempt,
            hashes=found.hashes,
            parts=found.parts,
            drift=self._contributed.drift,
            clients_moved=self._contributed.moved,
            losses=self._contributed.losses if attempt else (),
            skipped=self._contributed.skipped,
            local_s=self._local_s if attempt else 0.0,
            mean_moved=found.moved if attempt else 0.0,
            left_out=found.left_out,
            lost=found.lost,
            masks=found.masks,
            signed=found.said,
            sent_bytes=self.exchange.sent_bytes,
            upload_s=self.exchange.upload_s if attempt else 0.0,
            upload_bytes=self.exchange.upload_bytes if attempt else 0,
            more=self.start.more if self.start is not None and not attempt else 0,
            waited_s=self._busy_s + now - (now if self._waits_since is None else self._waits_since),
        )
        if found.code:
            report.problem.CopyFrom(common_pb2.Reason(code=found.code, text=found.why[:2000]))
        self._told.append(report)
        return e.Tell(broker_pb2.PeerMessage(round=report))

    def evaluated(self) -> list[e.Instruction]:
        """The version that the round began from was evaluated; only the hub has what it came to."""
        start, out = self.start, list[e.Instruction]()
        if start is None:
            return out
        if (evaluation := self._steps.take_evaluation()) is not None:
            report = broker_pb2.RoundReport(
                run=self._replica, term=self._term, round=start.round, evaluation=evaluation
            )
            self._told.append(report)
            out.append(e.Tell(broker_pb2.PeerMessage(round=report)))
        if _is_last(start):
            self._steps.end()
        return out

    def again(self) -> list[e.Instruction]:
        """For a broker that was started again."""
        return [e.Tell(broker_pb2.PeerMessage(round=report)) for report in self._told]

    def timer(self, now: float) -> list[e.Instruction]:
        """The plan's patience is over, unless something came or left meanwhile."""
        exchange = self.exchange
        if (until := exchange.waits_until) > now:
            return [e.SetTimer("round", until)]
        if exchange.again is not None and (told := exchange.again.lacks()):
            return told
        waited = exchange.waits_no_longer()
        plan = exchange.plan
        if self._applied or self._holds or plan is None or not exchange.begun:
            return waited
        lacks, code = exchange.lacking()
        result = e.RoundResult(code=code, why=f"waits for {', '.join(lacks) or 'its device'}")
        report = self._report(exchange.attempt, now, result)
        report.message.round.lacks.extend(lacks)
        self._told.pop()  # a broker that was started again plans another attempt
        return [*waited, report, e.SetTimer("round", now + plan.patience_s)]


def _at(start: broker_pb2.RoundStart) -> tuple[int, int]:
    return start.round, start.more


def _is_last(start: broker_pb2.RoundStart) -> bool:
    """Whether nothing is left to be done: no steps, and no clients."""
    return not start.steps and not start.cohort
