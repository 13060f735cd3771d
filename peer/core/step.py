"""The interpreter of one run's action lists: what may run next, and what each action leaves.

Rules:
- Actions run strictly in the order of the list, one at a time. The next one may run when all that
  it takes is there; what is local is there because an earlier action of this peer gave it.
- A step is one pass over the training list and, when an evaluation is due, one over the evaluation
  list. Evaluation is due after step s when (s + 1) % eval_every == 0, and after the last step.
- Frames may come early: while this peer is in step s, others can be in s + 1 already, never
  further, because the end of s + 1 needs this peer's part. So frames of s and s + 1 are wanted,
  older ones are late duplicates, and later ones break the plan.
- A step begins only when its data is there.
- Of a run with rounds between replicas no step begins before its round does (`rounds.py`), and an
  evaluation comes in front of a round's first step in place of behind a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from ...dag.plan.action import TRAITS, Action, ExchangeContent, Kind
from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Transfer
from ...net.links.frame import FrameKey
from ...proto import broker_pb2
from .events import Built, Result
from .peer_program import PeerProgram, programs_of

ENDLESS = 2**53
"""Steps of a replica before it is known how many it makes."""

__all__ = ["ENDLESS", "Done", "FrameVerdict", "Steps", "transfer_of", "waits_for"]


def transfer_of(key: FrameKey) -> Transfer:
    """What the plan calls the transfer of this frame."""
    return tuple.__new__(Transfer, key[3:])  # in one order


class FrameVerdict(Enum):
    """What to do with an arrived frame."""

    WANTED = "wanted"
    DUPLICATE = "duplicate of a frame that waits here"
    LATE = "late"
    UNPLANNED = "unplanned"


@dataclass(frozen=True, slots=True)
class Done:
    """What follows from a finished action: frames to send, values to free, and whether it ended
    the training pass, the step (evaluation included)."""

    sends: tuple[FrameKey, ...]
    releases: tuple[FrameKey, ...]
    trained: bool
    stepped: bool
    evaluated: bool = False
    """Whether it ended an evaluation in front of a step."""


class Steps:
    """Where a peer is in a run. Pure state; `PeerMachine` turns it into instructions."""

    def __init__(self, peer: PeerId, built: Built, first_step: int) -> None:
        flow = built.flow
        self._peer, self._flow = peer, flow
        self._run, self._term = built.run, built.term
        *self._training, self._evaluate = programs_of(flow, peer)
        self._rounds = built.vector is not None
        self.steps = ENDLESS if self._rounds else built.steps
        self.until = first_step if self._rounds else built.steps
        """The step that it does not begin yet; only rounds move it."""
        self._evaluated = first_step - 1
        """The last step in front of which the evaluation of a round was made, or is left out."""
        self._eval_every = 0 if self._rounds else built.eval_every
        self.step = first_step
        """The step that it is in, or will be in next."""
        self.evaluating = False
        """Whether it is in the evaluation pass of `step`."""
        self.position = 0
        """Index of the next action, or of the one in flight, in the list of this pass."""
        self.in_flight = False
        self.arrived: set[FrameKey] = set()
        """Values that are there, remote and local, and not consumed; of `step` and `step` + 1."""
        self._awaited: tuple[tuple[FrameKey, ...], list[FrameKey]] | None = None
        """What the next action takes, and what of that had not arrived yet; None: not found yet."""
        self.data_ready = first_step - 1
        """The last step whose data is on the host."""
        self.progress = 0
        """Grows with every finished action; for the watch that notices a stall."""
        self._clear()

    def _clear(self) -> None:
        self.started_at: float | None = None
        self.trained_s = 0.0
        self.compute_s = 0.0
        self.update_s = 0.0
        self.stage_times = {
            k: broker_pb2.StageTime(stage=k) for k in self._flow.plan.stages_of(self._peer)
        }
        """What each stage of this peer took in this step so far."""
        self.peak_bytes = 0
        self.outcome: broker_pb2.Outcome | None = None
        self.evaluation: broker_pb2.Evaluation | None = None
        self.links: tuple[broker_pb2.LinkUse, ...] = ()

    # ------------------------------------------------------------ what the plan says

    def _program(self, step: int) -> PeerProgram:
        """That of the training pass of a step."""
        return self._training[self._flow.at(step).is_full]

    @property
    def _train(self) -> PeerProgram:
        return self._program(self.step)

    @property
    def program(self) -> PeerProgram:
        return self._evaluate if self.evaluating else self._train

    @property
    def over(self) -> bool:
        """Whether every step that the run wants is done."""
        return self.step >= self.steps

    @property
    def waits(self) -> bool:
        """Whether it stands before a step that it does not begin yet."""
        return self.step >= self.until and not (self.evaluating or self.in_flight or self.over)

    @property
    def updates(self) -> int:
        """How many updates are in the stages here."""
        return self.step + 1 if self.evaluating and not self._rounds else self.step

    @property
    def begun(self) -> bool:
        """Whether something of the training pass after `updates` was done."""
        return not self.evaluating and (self.position > 0 or self.in_flight)

    @property
    def unchanged(self) -> bool:
        """Whether all that a snapshot of `updates` has is still as it was then: nobody is a step
        ahead before this peer gave its part of the norm; where others do not wait for that, before
        it began."""
        if self.evaluating or self.over:
            return True
        norm = (i for i, a in enumerate(self._train.actions) if a.content is ExchangeContent.NORM)
        given = 0 if self._flow.plan.without_norm else next(norm, 0)
        return self.position + self.in_flight <= min(given, self._turned)

    @property
    def unapplied(self) -> bool:
        """Whether nothing but `updates` is in the stages, whatever the codecs are at."""
        if self.evaluating or self.over:
            return True
        actions = self._train.actions
        update = next((i for i, a in enumerate(actions) if a.kind is Kind.UPDATE), len(actions))
        return self.position + self.in_flight <= min(update, self._turned)

    @cached_property
    def _turned(self) -> int:
        """How many actions there are before the first that changes the state of an optimizer: it is
        the update itself, but where updates are exchanged in place of gradients."""
        actions = self._train.actions
        gives = (i for i, a in enumerate(actions) if a.content is ExchangeContent.DELTA)
        return next(gives, len(actions))

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation in which this peer has a part follows `step`."""
        if not self._eval_every or not self._evaluate.actions:
            return False
        return (step + 1) % self._eval_every == 0 or step + 1 == self.steps

    @property
    def waits_for_evaluation(self) -> bool:
        """Whether this peer's report of `step` will carry the evaluation's outcome: it is the one
        that combines it."""
        return self.evaluates_after(self.step) and any(
            a.kind is Kind.TAKE and a.content is ExchangeContent.SCORES
            for a in self._evaluate.actions
        )

    def neighbours(self) -> tuple[PeerId, ...]:
        """Peers with which any action exchanges frames, in order of first use."""
        found: dict[PeerId, None] = {}
        for program in (*self._training, self._evaluate):
            for takes, gives in zip(program.takes, program.gives, strict=True):
                for transfer in (*takes, *gives):
                    found[transfer.source] = found[transfer.destination] = None
        return tuple(p for p in found if p != self._peer)

    def key(self, transfer: Transfer) -> FrameKey:
        """The transfer in the present step, as a frame."""
        return tuple.__new__(FrameKey, (self._run, self._term, self.step, *transfer))

    # ------------------------------------------------------------ frames

    def judge(self, key: FrameKey) -> FrameVerdict:
        """What to do with a frame of this run and term that came in."""
        transfer, step = transfer_of(key), key.step
        taker = self._program(step).taker.get(transfer)
        evaluates = taker is None
        if taker is None:
            taker = self._evaluate.taker.get(transfer)
            if taker is None or not (self._rounds or self.evaluates_after(step)):
                return FrameVerdict.UNPLANNED
        if key.source == self._peer or step >= self.steps or step > self.step + 1:
            return FrameVerdict.UNPLANNED
        if key in self.arrived:
            return FrameVerdict.DUPLICATE
        if step < self.step:
            return FrameVerdict.LATE
        if step == self.step:
            if self._rounds:
                if evaluates and not self.evaluating and self._evaluated >= step:
                    return FrameVerdict.LATE
            elif self.evaluating and not evaluates:
                return FrameVerdict.LATE
            if self.evaluating == evaluates and taker < self.position + self.in_flight:
                return FrameVerdict.LATE
        return FrameVerdict.WANTED

    def missing(self) -> tuple[Transfer, ...]:
        """What the next action still waits for."""
        if self.over or self.in_flight or self.waits:
            return ()
        return tuple(
            t for t in self.program.takes[self.position] if self.key(t) not in self.arrived
        )

    def complete(self) -> bool:
        """Whether all that the next action takes is there."""
        lacking = self._wait()[1]
        while lacking:  # nothing that arrived goes away before the action has ended
            if lacking[-1] not in self.arrived:
                return False
            lacking.pop()
        return True

    def _wait(self) -> tuple[tuple[FrameKey, ...], list[FrameKey]]:
        """What the next action takes, and what of it is not known to be there."""
        if self._awaited is None:
            prefix, arrived = (self._run, self._term, self.step), self.arrived
            takes = self.program.takes[self.position]
            keys = tuple([tuple.__new__(FrameKey, prefix + t) for t in takes])
            self._awaited = keys, [k for k in keys if k not in arrived]
        return self._awaited

    # ------------------------------------------------------------ actions

    def begin_next(self, now: float) -> Action | None:
        """The action to compute now, marked as in flight; None while something is missing."""
        if self.over or self.in_flight or self.waits:
            return None
        if (self.data_ready < self.step and not self.evaluating) or not self.complete():
            return None
        if self.started_at is None:
            self.started_at = now
        self.in_flight = True
        return self.program.actions[self.position]

    def finish(self, action: Action, result: Result, now: float) -> Done:
        """Takes over the result of the action in flight and moves on.

        After `stepped` the numbers of the step are still there until `leave_step`.
        """
        program, at = self.program, self.position
        assert self.in_flight, f"{action} ended and was not begun"
        assert program.actions[at] == action, f"{action} ended, {program.actions[at]} was begun"
        releases = self._wait()[0]
        self.arrived.difference_update(releases)
        sends: list[FrameKey] = []
        prefix = self._run, self._term, self.step
        for transfer in program.gives[at]:
            key = tuple.__new__(FrameKey, prefix + transfer)
            if transfer.destination == self._peer:
                self.arrived.add(key)
            else:
                sends.append(key)
        self.in_flight = False
        self._awaited = None
        self.position += 1
        self.progress += 1
        self.compute_s += result.seconds
        self._add(action, result.seconds)
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)
        self.outcome = result.outcome or self.outcome
        self.evaluation = result.evaluation or self.evaluation
        self.links = result.links or self.links
        trained = stepped = evaluated = False
        if self.position == len(program.actions):
            if self.evaluating and self._rounds:
                self.evaluating, self.position, evaluated = False, 0, True
            elif not self.evaluating:
                trained = True
                self.trained_s = now - (now if self.started_at is None else self.started_at)
                self.evaluating = self.evaluates_after(self.step)
                self.position = 0
                stepped = not self.evaluating
            else:
                stepped = True
        return Done(tuple(sends), releases, trained, stepped, evaluated)

    def begin_round(self, steps: int, *, evaluates: bool) -> None:
        """Allow so many steps from now on, behind an evaluation perhaps."""
        self.until = self.step + steps
        self._evaluated = self.step
        self.evaluating = evaluates and bool(self._evaluate.actions)

    def take_evaluation(self) -> broker_pb2.Evaluation | None:
        """What the one in front of the step came to: it is not that of the step."""
        found, self.evaluation = self.evaluation, None
        return found

    def end(self) -> None:
        """No step comes any more."""
        self.steps = self.until = self.step

    def _add(self, action: Action, seconds: float) -> None:
        """Seconds of training by stage; an evaluation, an exchange and the norm are no stage's."""
        traits = TRAITS[action.kind]
        if traits.trains:
            time = self.stage_times[action.stage]
            if traits.work == "forward":
                time.visits += 1
                time.forward_s += seconds
            else:
                time.backward_s += seconds
        elif action.kind is Kind.UPDATE:
            self.update_s += seconds

    def leave_step(self) -> None:
        """Goes on to the next step. Nothing of the old one may still wait to be consumed."""
        left = [k for k in self.arrived if k.step == self.step]
        assert not left, f"step {self.step} ended and nobody consumed {sorted(map(str, left))[0]}"
        self.step += 1
        self.position = 0
        self._awaited = None
        self.evaluating = False
        self._clear()

    # ------------------------------------------------------------ for people and tests

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts the rules of this module."""
        assert 0 <= self.position <= len(self.program.actions), repr(self)
        assert self.data_ready <= self.step + 1, "data is fetched at most one step ahead"
        if self.in_flight:
            takes = self.program.takes[self.position]
            assert all(self.key(t) in self.arrived for t in takes), "ran before its inputs came"
        for key in self.arrived:
            assert (key.run, key.term) == (self._run, self._term), f"foreign {key}"
            assert key.step in (self.step, self.step + 1), f"{key} in step {self.step}"
            transfer = transfer_of(key)
            train = self._program(key.step)
            planned = transfer in train.taker or transfer in self._evaluate.taker
            assert planned, f"unplanned {key}"

    def __repr__(self) -> str:
        if self.over:
            return f"{self.steps} steps done"
        action = self.program.actions[self.position] if self.program.actions else "-"
        doing = "computing" if self.in_flight else f"waiting for {len(self.missing())} frames"
        return f"step {self.step} {action} {doing}"


def waits_for(missing: tuple[Transfer, ...]) -> str:
    """Transfers that did not come, in words."""
    first = missing[0]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"{first.role.value} {first.port} of microbatch {first.microbatch} "
        f"from {first.source}{more}"
    )
