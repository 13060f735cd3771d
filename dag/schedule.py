"""Schedules as data: what each peer does in a step, in which order.

An action prints as short text and parses back:

    F3@1  forward of microbatch 3 through stage 1        B3@1  its backward
    E2@1  forward of held-out microbatch 2, no gradient
    S>@1  S+@1  S<@1   exchange of stage 1 among its holders: give parts, add up, take the sums
    T>@0  T+@0  T<@0   the same for the gradient of tied group 0 among its stages
    N>    N+    N<     the same for norm, weight and loss among all peers; the hub adds up
    U     update: divide by the weight, clip, optimizer step, buffers
    V>    V+           results of an evaluation go to the hub, which adds them up

Both schedules come from one simulation in unit times (a forward and a backward take one unit, a
transfer none): at every instant each peer starts the best action that is ready. So any plan, with
any holders and routes, gets lists that one execution has followed to the end: no deadlock is left.

- Every holder of a stage takes its microbatches in ascending order, forward and backward, so that
  gradients add up in microbatch order under any schedule. The lowest unfinished microbatch is
  therefore never behind another one, and the simulation always goes on.
- GPipe: all forwards of a peer, then all its backwards.
- 1F1B: backward before forward, and a bound on the microbatches that are live in (stage, holder):
  K - index for K stages, as in the textbook; more, the number of holders from this stage on over
  those of this stage, where later stages have more holders and would starve otherwise.

What each action takes and gives stands in `flow.py`; `check.py` proves lists and prints them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .cut import Stage, TiedGroup
from .plan import PeerId, Plan, Route

__all__ = [
    "Action",
    "Kind",
    "ScheduleError",
    "evaluation_actions",
    "hub_of",
    "shares_gradient",
    "step_actions",
]


class ScheduleError(ValueError):
    """Action lists that break a rule, or a text that is no action."""


class Kind(StrEnum):
    """What an action does; the text is what it prints as."""

    FORWARD = "F"
    BACKWARD = "B"
    EVALUATE = "E"
    SYNC_GIVE = "S>"
    SYNC_COMBINE = "S+"
    SYNC_TAKE = "S<"
    TIED_GIVE = "T>"
    TIED_COMBINE = "T+"
    TIED_TAKE = "T<"
    NORM_GIVE = "N>"
    NORM_COMBINE = "N+"
    NORM_TAKE = "N<"
    UPDATE = "U"
    EVAL_GIVE = "V>"
    EVAL_COMBINE = "V+"


VISITS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.EVALUATE})
"""Kinds that belong to one microbatch and one stage."""
EXCHANGES = frozenset(
    {
        Kind.SYNC_GIVE,
        Kind.SYNC_COMBINE,
        Kind.SYNC_TAKE,
        Kind.TIED_GIVE,
        Kind.TIED_COMBINE,
        Kind.TIED_TAKE,
    }
)
"""Kinds that belong to one stage, or for T to one tied group."""

_TEXT = re.compile(
    r"(?P<visit>[FBE])(?P<microbatch>0|[1-9]\d{0,8})@(?P<stage>0|[1-9]\d{0,8})"
    r"|(?P<exchange>[ST][>+<])@(?P<group>0|[1-9]\d{0,8})"
    r"|(?P<single>N[>+<]|V[>+]|U)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One entry of a list. `stage` is the tied group's index for T; numbers that the kind has no
    use for stay 0."""

    kind: Kind
    microbatch: int = 0
    stage: int = 0

    def __str__(self) -> str:
        if self.kind in VISITS:
            return f"{self.kind.value}{self.microbatch}@{self.stage}"
        return f"{self.kind.value}@{self.stage}" if self.kind in EXCHANGES else self.kind.value

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`; raises ScheduleError for any other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action: expected e.g. F3@1, B0@2, S>@1, T+@0, N<, U"
            )
        if match["visit"]:
            return cls(Kind(match["visit"]), int(match["microbatch"]), int(match["stage"]))
        if match["exchange"]:
            return cls(Kind(match["exchange"]), stage=int(match["group"]))
        return cls(Kind(match["single"]))


def hub_of(plan: Plan, stages: Sequence[Stage]) -> PeerId:
    """The peer that adds up norms and results: the first holder of the stage of the loss."""
    return next(plan.stages[s.index].holders[0] for s in stages if s.makes_loss)


def shares_gradient(stage: Stage) -> bool:
    """Whether several holders of the stage would have gradients to add up."""
    return stage.has_backward and bool(stage.trainable)


def step_actions(
    plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup]
) -> dict[PeerId, tuple[Action, ...]]:
    """The list of every peer for one training step: visits, then S, T, N and U."""
    lists = _Simulation(plan, stages, plan.routes, training=True).run()
    hub = hub_of(plan, stages)
    for peer in plan.peers:
        lists[peer] += _exchanges(plan, stages, tied, peer)
        lists[peer].append(Action(Kind.NORM_GIVE))
        lists[peer].append(Action(Kind.NORM_COMBINE if peer == hub else Kind.NORM_TAKE))
        lists[peer].append(Action(Kind.UPDATE))
    return {peer: tuple(found) for peer, found in lists.items()}


def evaluation_actions(plan: Plan, stages: Sequence[Stage]) -> dict[PeerId, tuple[Action, ...]]:
    """The list of every peer for one evaluation; all empty when the plan evaluates nothing."""
    lists = _Simulation(plan, stages, plan.evaluation_routes, training=False).run()
    if plan.evaluation_routes:
        loss_stage = next(s.index for s in stages if s.makes_loss)
        for peer in plan.peers:
            if any(a.kind is Kind.EVALUATE and a.stage == loss_stage for a in lists[peer]):
                lists[peer].append(Action(Kind.EVAL_GIVE))
        lists[hub_of(plan, stages)].append(Action(Kind.EVAL_COMBINE))
    return {peer: tuple(found) for peer, found in lists.items()}


def _exchanges(
    plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup], peer: PeerId
) -> list[Action]:
    """S and T of a peer. Every giving comes before every adding up, and that before every taking,
    on all peers alike: so no two peers wait for each other."""
    gives: list[Action] = []
    adds: list[Action] = []
    takes: list[Action] = []
    for stage in stages:
        i, holders = stage.index, plan.stages[stage.index].holders
        if peer not in holders or len(holders) < 2:
            continue
        gradient = shares_gradient(stage)
        # Statistics come from the holders that run microbatches; not every holder has to.
        ran = (
            {v.peer for r in plan.routes for v in r if v.stage == i} if stage.statistics else set()
        )
        if gradient or peer in ran:
            gives.append(Action(Kind.SYNC_GIVE, stage=i))
        if gradient:
            adds.append(Action(Kind.SYNC_COMBINE, stage=i))
        if gradient or ran - {peer}:
            takes.append(Action(Kind.SYNC_TAKE, stage=i))
    found = gives + adds + takes
    for kind in (Kind.TIED_GIVE, Kind.TIED_COMBINE, Kind.TIED_TAKE):
        for group in tied:
            holders_of = [plan.stages[i].holders for i in group.stages]
            hub = holders_of[0][0]
            if (
                (kind is Kind.TIED_GIVE and any(peer == holders[0] for holders in holders_of))
                or (kind is Kind.TIED_COMBINE and peer == hub)
                or (kind is Kind.TIED_TAKE and peer != hub and any(peer in h for h in holders_of))
            ):
                found.append(Action(kind, stage=group.index))
    return found


class _Simulation:
    """List scheduling of forwards and backwards in unit times; see the module's docstring."""

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], routes: Sequence[Route], *, training: bool
    ) -> None:
        self.peers = plan.peers
        self.gpipe = plan.schedule == "gpipe" and training
        self.training = training
        self.forward = Kind.FORWARD if training else Kind.EVALUATE
        self.has_backward = [training and s.has_backward for s in stages]
        self.needs_forward_of = [sorted({p.source for p in s.receives}) for s in stages]
        self.needs_backward_of = [
            sorted({t for p in s.sends for t in p.grad_targets}) for s in stages
        ]
        # The backward of the loss also takes results of later stages.
        self.needs_late_of = [sorted({p.source for p in s.late}) for s in stages]
        # A microbatch stops being live in a stage with this action; where nothing is differentiated
        # it still fills the next stage's receive slots, until the first backward above it.
        backward = [i for i, on in enumerate(self.has_backward) if on]
        last = len(stages) - 1
        self.ends_with = [
            (Kind.BACKWARD, min((b for b in backward if b >= i), default=-1))
            for i in range(last + 1)
        ]
        self.ends_with = [e if e[1] >= 0 else (self.forward, last) for e in self.ends_with]
        width = (
            [len({route[i].peer for route in routes}) for i in range(last + 1)] if routes else []
        )
        self.limit = [
            max(last + 1 - i, -(-sum(width[i:]) // width[i])) if routes else 0
            for i in range(last + 1)
        ]
        self.forwards: dict[tuple[PeerId, int], list[int]] = {}
        for m, route in enumerate(routes):
            for visit in route:
                self.forwards.setdefault((visit.peer, visit.stage), []).append(m)
        self.routes = routes
        self.live = dict.fromkeys(self.forwards, 0)
        self.next_forward = dict.fromkeys(self.forwards, 0)
        self.next_backward = {key: 0 for key in self.forwards if self.has_backward[key[1]]}
        self.done: set[tuple[Kind, int, int]] = set()

    def run(self) -> dict[PeerId, list[Action]]:
        lists: dict[PeerId, list[Action]] = {peer: [] for peer in self.peers}
        holding: dict[PeerId, list[int]] = {peer: [] for peer in self.peers}
        for peer, stage in sorted(self.forwards, key=lambda key: key[1]):
            holding[peer].append(stage)
        total = sum(map(len, self.forwards.values()))
        total += sum(len(self.forwards[key]) for key in self.next_backward)
        while len(self.done) < total:
            # Everyone chooses from what was finished before this instant, then all finish.
            chosen = [(peer, self._choose(peer, holding[peer])) for peer in self.peers]
            started = [(peer, action) for peer, action in chosen if action is not None]
            assert started, f"no peer can go on after {len(self.done)} of {total} actions"
            for peer, action in started:
                self._finish(peer, action)
                lists[peer].append(action)
        return lists

    def _finish(self, peer: PeerId, action: Action) -> None:
        if action.kind is Kind.BACKWARD:
            self.next_backward[peer, action.stage] += 1
        else:
            self.next_forward[peer, action.stage] += 1
            self.live[peer, action.stage] += 1
        self.done.add((action.kind, action.microbatch, action.stage))
        for i, end in enumerate(self.ends_with):
            if end == (action.kind, action.stage):
                self.live[self.routes[action.microbatch][i].peer, i] -= 1

    def _choose(self, peer: PeerId, holding: Sequence[int]) -> Action | None:
        """The best ready action of a peer: the lowest microbatch first, then the stage nearest to
        where that microbatch is going."""
        forwards = [a for i in holding if (a := self._ready_forward(peer, i))]
        backwards = [a for i in holding if (a := self._ready_backward(peer, i))]
        if self.gpipe and any(
            self.next_forward[peer, i] < len(self.forwards[peer, i]) for i in holding
        ):
            backwards = []
        ready = backwards or forwards
        return min(ready, key=lambda a: (a.microbatch, -a.stage), default=None)

    def _ready_forward(self, peer: PeerId, stage: int) -> Action | None:
        queue, at = self.forwards[peer, stage], self.next_forward[peer, stage]
        if at == len(queue):
            return None
        m = queue[at]
        if any((self.forward, m, i) not in self.done for i in self.needs_forward_of[stage]):
            return None
        if not self.gpipe and self.live[peer, stage] >= self.limit[stage]:
            return None
        return Action(self.forward, m, stage)

    def _ready_backward(self, peer: PeerId, stage: int) -> Action | None:
        if (peer, stage) not in self.next_backward:
            return None
        queue, at = self.forwards[peer, stage], self.next_backward[peer, stage]
        if at == len(queue):
            return None
        m = queue[at]
        ready = (
            (self.forward, m, stage) in self.done
            and all((Kind.BACKWARD, m, i) in self.done for i in self.needs_backward_of[stage])
            and all((self.forward, m, i) in self.done for i in self.needs_late_of[stage])
        )
        return Action(Kind.BACKWARD, m, stage) if ready else None
