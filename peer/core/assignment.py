"""One assignment: this peer's part in one term of one run, from Assign to Leave.

    BUILDING --Built--> READY --Start--> RUNNING --last step--> EXPORTING --stored--> FINISHED
        \\_________________________ any failure ___________________________/
    WARM                              FAILED

- BUILDING: links are dialled or expected, parameters fetched, the stages built. READY is told once.
  A term that goes on from a snapshot waits for those that others give (`keeping/`). What a lost
  stage is made from is given when the giver's own stages stand.
- WARM: it holds no stage, keeps snapshots of those that do, and fetches what is frozen in their
  stages (`peer/compute/warming.py`).
- RUNNING: the action lists (`step.py`). After each update a StepReport; the peer that combines an
  evaluation reports after it. The data of the next step is fetched while this one computes.
- An arrived frame that the plan does not name ends the assignment here: its sender follows another
  plan. A late or doubled one is dropped and counted, and so is any of a snapshot.
- A broken link is not an end: the broker hears of it, which may miss a sign of life of the other
  one, and the transport dials again. When it stays down for `link_s`, or no action could run for
  `stall_s` (or 20 steps, when that is longer), the broker is told and decides what follows.
- What is held on the device is looked at after each action: a run that passes what the owner offers
  ends here, whatever its plan said.
- A step that is on hold is not begun: parts are handed over there, under the next term's plan.
- Weights leave for the broker when it asks for them, and at the end (`weights_export.py`).
- Without the broker it goes on. Its reports are kept (`reports.py`); data and uploads that fail
  then are tried again when the broker is back, and nobody is blamed for standing still.
- FAILED: everything here is discarded, the links are hung up, the broker knows why. The peer
  itself goes on. FINISHED and FAILED end with the broker's Leave or a newer term.

Pure: no I/O, no clock, no threads.
"""

from __future__ import annotations

from dataclasses import replace

from ...dag.plan.action import ROUNDS
from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Role
from ...job.words import size_text
from ...net.links.frame import FrameKey
from ...proto import broker_pb2, common_pb2
from . import events as e
from .keeping.snapshot_manager import takes
from .part import Part, Phase
from .reports import step_report
from .rounds.rounds import Rounds
from .step import FrameVerdict, Steps, waits_for

__all__ = ["STOP_AT", "Assignment"]

STOP_AT = 1.1
"""Times what the owner offers beyond which stages are not built, and a run is stopped: plans
foresee what is held to a tenth, and none within the offer is stopped for a short estimate."""


class Assignment(Part):
    """This peer's part in one term of one run, from Assign to Leave: what events lead to. Its
    methods return what is to be done, in order."""

    # ------------------------------------------------------------ building

    def begin(self) -> list[e.Instruction]:
        dials = {PeerId(d.peer): d for d in self._assign.dials}
        snapshots = self.keeping.begin(self._assign)
        self.peers = tuple(dict.fromkeys((*self.peers, *self.keeping.counterparts)))
        self._links.expect(self.peers)
        strangers = [p for p in dials if p not in self.peers]
        if not self._holds and not self.peers:
            return self.fail("plan", f"the plan names no stage for {self.peer}")
        if strangers:
            return self.fail("plan", f"told to dial {strangers[0]}, which holds no stage")
        out: list[e.Instruction] = []
        for peer in self.peers:
            if peer in dials:
                out.append(e.Dial(peer, dials[peer].address, dials[peer].generation))
            else:
                out.append(e.ExpectPeer(peer))
        out += snapshots
        if not self._holds:
            self.phase = Phase.WARM
            return [*out, e.PrefetchFrozen(self._assign, self._memory_bytes)]
        self._awaits = self.keeping.awaits
        return out if self._awaits else [*out, self._build()]

    def _build(self) -> e.Build:
        return e.Build(self.run, self.term, self._assign, self.keeping.resumed, self._memory_bytes)

    def built(self, event: e.Built) -> list[e.Instruction]:
        assert self.phase is Phase.BUILDING, f"built in phase {self.phase.value}"
        if self._memory_bytes and event.device_bytes > self._memory_bytes:
            return self.fail(
                "memory",
                f"the stages need {event.device_bytes} bytes on the device, this peer offers "
                f"{self._memory_bytes}: give it fewer operators or more memory",
            )
        if self._assign.steps:
            event = replace(event, steps=self._assign.steps)
        self.steps = Steps(self.peer, event, int(self._assign.first_step))
        self._exports, self._partial = bool(event.exports), event.partial
        self.phase = Phase.READY
        out: list[e.Instruction] = [e.Allow(p, role, n) for p, role, n in event.slots]
        if event.vector is not None:
            self.rounds = Rounds(
                *(self.peer, self.run, self.term, event.vector, self.steps), near=self._near
            )
            if self._assign.HasField("round"):
                out += self.rounds.begins(self._assign.round)
        elif not self.steps.over:
            out.append(e.Prefetch(self.run, self.term, self.steps.step))
        ready = broker_pb2.Ready(run=self.run, term=self.term, device_bytes=event.device_bytes)
        return [*out, *self.keeping.give_blocks(), e.Tell(broker_pb2.PeerMessage(ready=ready))]

    def start(self, now: float) -> list[e.Instruction]:
        if self.phase is not Phase.READY or self.steps is None:
            return []  # said twice, or before this peer was ready: the broker's slip, no harm
        self.phase = Phase.RUNNING
        out = self.keeping.rebuilt() + self._links.need(self.steps.neighbours(), now)
        return [*out, *self._watch(now), *self._take_snapshot(), *self._advance(now)]

    # ------------------------------------------------------------ rounds between replicas

    def round_begins(self, start: broker_pb2.RoundStart, now: float) -> list[e.Instruction]:
        """More steps may be done; what was exchanged before is committed."""
        if self.rounds is None:
            return []
        out = self.rounds.begins(start)
        return [*out, *self._take_snapshot(), *self._advance(now)]

    def round_planned(self, plan: broker_pb2.RoundPlan, now: float) -> list[e.Instruction]:
        """Take the plan of an exchange, which begins when this peer is ready for it."""
        if self.rounds is None:
            return []
        return [*self.rounds.planned(plan, now), *self._advance(now)]

    def round_masks(self, told: broker_pb2.RoundMasks, now: float) -> list[e.Instruction]:
        """What others told of the masks of an exchange, or what is wanted of this peer."""
        if self.rounds is None:
            return []
        self.rounds.hears(told)
        return self._advance(now)

    # ------------------------------------------------------------ links and patience

    def link(self, peer: PeerId, up: bool, now: float) -> list[e.Instruction]:
        if peer not in self._links:
            return []
        out = self._links.changed(peer, up, tells=self.alive)
        running = self.phase is Phase.RUNNING and self.steps is not None
        if running and self.steps and peer in self.steps.neighbours():
            out += self._links.need([peer], now)
        return out

    def link_timer(self, peer: PeerId, now: float) -> list[e.Instruction]:
        away_s = self._links.too_long(peer, now)
        if self.phase is not Phase.RUNNING or not away_s:
            return []
        text = f"no link between {self.peer} and {peer} for {away_s:.0f} s"
        return [self._fault("link", text, about=peer)]

    def _watch(self, now: float) -> list[e.Instruction]:
        assert self.steps
        self._watched = self.steps.progress
        wait = max(self._patience.stall_s, 20 * self._last_step_s)
        return [e.SetTimer("stall", now + wait)]

    def stall_timer(self, now: float, away: bool) -> list[e.Instruction]:
        if self.phase is not Phase.RUNNING or self.steps is None:
            return []
        # Perhaps others keep all the reports that they may.
        if away or self._on_hold or self.steps.waits:
            return self._watch(now)
        out = self._watch(now) if self.steps.progress != self._watched else []
        if out or self.steps.in_flight:  # a device that computes for long is not stuck
            return out or self._watch(now)
        missing = self.steps.missing()
        what = waits_for(missing) if missing else "the data of the step"
        about = missing[0].source if missing else ""
        text = f"{self.peer} has waited too long in step {self.steps.step} for {what}"
        return [self._fault("stalled", text, about=about)]

    # ------------------------------------------------------------ steps

    def data_ready(self, step: int, now: float) -> list[e.Instruction]:
        if self.steps is None:
            return []
        self.steps.data_ready = max(self.steps.data_ready, step)
        return self._advance(now)

    def data_failed(self, step: int, code: str, why: str, away: bool) -> list[e.Instruction]:
        if away:
            self._data_waits = step
            return []
        return self.fail(code, f"the data of step {step} could not be had: {why}")

    def frame(self, key: FrameKey, now: float) -> list[e.Instruction]:
        if key.role is Role.SNAPSHOT:
            self.dropped += not self.keeping.expects(key)
            return self._snapshots_changed(self.keeping.arrived(key))
        if key.role is Role.ROUND:
            if self.rounds is None:
                return [e.Release(key)]
            before = self.rounds.exchange.late
            out = [*self.rounds.arrived(key, now), *self._advance(now)]
            self.dropped += self.rounds.exchange.late - before
            return out
        if self.steps is None:
            return self.fail("frame", f"{key} came before {self.peer} was ready")
        verdict = self.steps.judge(key)
        if verdict is FrameVerdict.WANTED:
            self.steps.arrived.add(key)
            return self._advance(now)
        if verdict is FrameVerdict.UNPLANNED:
            return self.frame_refused(key, f"the plan of {self.peer} does not name it", now)
        self.dropped += 1
        # A doubled frame that still waits shares its tensor with the first: freeing would lose it.
        return [e.Release(key)] if verdict is FrameVerdict.LATE else []

    def frame_refused(self, key: FrameKey, why: str, now: float) -> list[e.Instruction]:
        if key.role is Role.ROUND:
            return [e.Release(key)] if self.rounds is None else self.rounds.refused(key, why, now)
        if key.role is Role.SNAPSHOT:
            own = key.source == self.peer
            self.dropped += not own and not self.keeping.expects(key)
            return self._snapshots_changed(self.keeping.refused(key, why))
        return [e.Release(key), *self.fail("frame", f"refused {key}: {why}")]

    def frame_queued(self, key: FrameKey, size_bytes: int, now: float) -> list[e.Instruction]:
        if key.role is Role.ROUND and self.rounds is not None:
            return self.rounds.queued(key, size_bytes, now)
        if key.role not in (Role.ROUND, Role.SNAPSHOT):
            self._sent_bytes += size_bytes
        return []

    def frame_acknowledged(
        self, key: FrameKey, began_s: float | None, now: float
    ) -> list[e.Instruction]:
        if key.role is not Role.ROUND or self.rounds is None:
            return []
        return self.rounds.exchange.acknowledged(key, began_s, now)

    def sent_again(self, size_bytes: int) -> None:
        """Bytes of frames that a broken connection lost."""
        self._again_bytes += size_bytes

    def computed(self, event: e.Computed, now: float) -> list[e.Instruction]:
        assert self.steps
        held, most = event.result.peak_bytes, self._memory_bytes
        if most and held > STOP_AT * most:
            return self.fail(
                "memory",
                f"the stages held {size_text(held)} on the device in step {self.step}, this peer "
                f"offers {size_text(most)}: give it fewer operators or smaller microbatches",
            )
        steps, rounds = self.steps, self.rounds
        if event.action.kind in ROUNDS:
            assert rounds is not None, f"{event.action}, of a run without rounds"
            of_round = rounds.computed(event.action, event.result, now)
            return [*of_round, *self._take_snapshot(), *self._advance(now)]
        done = steps.finish(event.action, event.result, now)
        out: list[e.Instruction] = [e.SendFrame(k) for k in done.sends]
        out += [e.Release(k) for k in done.releases]
        if done.evaluated and rounds is not None:
            out += rounds.evaluated()
        if done.trained:
            self._last_step_s = steps.trained_s
            asked = self._export.stepped(steps.step + 1)
            out += asked if self._exports and steps.step + 1 < steps.steps else []
        if done.trained or done.stepped:
            if done.stepped if steps.waits_for_evaluation else done.trained:
                out.append(self._report(steps))
            if done.stepped:
                steps.leave_step()
        return out + self._take_snapshot() + self._advance(now)

    def _advance(self, now: float) -> list[e.Instruction]:
        """The next action if it can run, with the next step's data; the export when all is done."""
        steps = self.steps
        if self.phase is not Phase.RUNNING or steps is None:
            return []
        if steps.over:
            if not self._exports:
                self.phase = Phase.FINISHED
                return []
            self.phase = Phase.EXPORTING
            return self._export.end(steps.steps)
        if self.rounds is not None and not steps.in_flight:
            of_rounds = self.rounds.goes_on(now)
            if of_rounds or self.rounds.computing or steps.waits:
                return of_rounds
        if steps.position == 0 and not steps.evaluating and (self._on_hold or self.reports.full):
            return []
        action = steps.begin_next(now)
        if action is None:
            return []
        out: list[e.Instruction] = [e.Compute(self.run, self.term, steps.step, action)]
        begins = steps.position == 0 and not steps.evaluating
        if begins and steps.step + 1 < steps.until:
            out.append(e.Prefetch(self.run, self.term, steps.step + 1))
        return out

    @property
    def _on_hold(self) -> bool:
        """Whether it is in front of the step that nobody begins."""
        steps, hold = self.steps, self.keeping.hold
        if steps is None or not hold or steps.evaluating:
            return False
        return steps.step == hold and not steps.begun

    def _report(self, steps: Steps) -> e.Tell:
        sent, again = self._sent_bytes, self._again_bytes
        self._sent_bytes = self._again_bytes = 0
        return self._tell(step_report(self.run, self.term, steps, sent, again))

    # ------------------------------------------------------------ the broker's disk

    def committed(self, step: int, now: float) -> list[e.Instruction]:
        """The broker has every step before this one on its disk."""
        self.reports.committed(step)
        return self._advance(now)

    def resumed(self, step: int, now: float) -> list[e.Instruction]:
        """The broker was started again, and lacks the steps from this one on."""
        out: list[e.Instruction] = [e.Tell(m) for m in self.reports.again(step)]
        out += [] if self.rounds is None else self.rounds.again()
        if self._data_waits is not None:
            out.append(e.Prefetch(self.run, self.term, self._data_waits))
            self._data_waits = None
        if self.phase is Phase.EXPORTING:
            out += self._export.broker_back()
        out += self._links.told_again()
        if self.phase is Phase.RUNNING:
            out += self._watch(now)
        return [*out, *self._advance(now)]

    # ------------------------------------------------------------ snapshots

    def snapshot_ordered(self, order: broker_pb2.SnapshotOrder, now: float) -> list[e.Instruction]:
        """Take a snapshot when its updates are in, if it names a step. Who keeps copies and which
        step is on hold have changed, perhaps."""
        if not (self._holds and self.alive):
            return []
        out, self.peers = self._links.keeper(order), self._links.peers
        if not takes(order):
            return [*out, *self._advance(now)]
        self.keeping.wanted = order.step
        return [*out, *self._take_snapshot(), *self._advance(now)]

    def _take_snapshot(self) -> list[e.Instruction]:
        """The ordered one, if it is time."""
        wanted, steps = self.keeping.wanted, self.steps
        if wanted is None or steps is None or self.phase in (Phase.BUILDING, Phase.READY):
            return []
        if wanted > steps.updates and not steps.over:
            return []
        rounds, of_round = self.rounds, self.keeping.of_round
        if wanted == steps.updates and rounds and not rounds.stands_at(wanted, of_round):
            return []  # the version of that round will be here first, or another order
        held = wanted == self.keeping.hold > 0
        still = not steps.begun if held else steps.unchanged
        if wanted == steps.updates and still and self.alive:
            return self.keeping.take(wanted)
        return self.keeping.missed(wanted, f"step {steps.step} has begun at {self.peer}")

    def _snapshots_changed(self, out: list[e.Instruction]) -> list[e.Instruction]:
        """Builds when all that it goes on from is here."""
        if self.phase is not Phase.BUILDING or not self._awaits:
            return out
        if why := self.keeping.refused_gift:
            return [*out, *self.fail("frame", why)]
        self._awaits = self.keeping.awaits
        return out if self._awaits else [*out, self._build()]

    # ------------------------------------------------------------ weights

    def export_asked(self) -> list[e.Instruction]:
        """The weights are wanted as after the present step; at the end they come anyway."""
        if self.phase in (Phase.BUILDING, Phase.READY, Phase.RUNNING):
            self._export.asked = True
        return []

    def exported(self, step: int, blob: common_pb2.BlobRef) -> list[e.Instruction]:
        if self.phase is Phase.EXPORTING and self.steps and step == self.steps.steps:
            self.phase = Phase.FINISHED
        message = broker_pb2.Exported(
            run=self.run, term=self.term, step=step, weights=blob, partial=self._partial
        )
        return [self._tell(broker_pb2.PeerMessage(exported=message))]

    def export_failed(self, step: int, why: str, now: float, away: bool) -> list[e.Instruction]:
        if self.phase is not Phase.EXPORTING or self.steps is None or step != self.steps.steps:
            return self.export_asked()
        if (out := self._export.failed(now, away=away)) is not None:
            return out
        tries = self._patience.export_tries
        return self.fail("export", f"the weights could not be stored in {tries} tries: {why}")

    def export_timer(self) -> list[e.Instruction]:
        return self._export.again() if self.phase is Phase.EXPORTING else []
