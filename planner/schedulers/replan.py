"""Whether a running plan should give way to a better one.

Speeds are measured step by step and noisy, so the best plan changes all the time and moving costs.
Rules:

- The gain of a candidate is 1 - its step time over that of the running plan, both predicted from
  the same corrected speeds, and smoothed in logarithms over SMOOTHING steps.
- A move is decided when the smoothed gain was at least LEAST_GAIN for STEPS steps in a row, and
      gain · step seconds · remaining steps > FACTOR · migration seconds
  where the migration is what the slowest receiver has to fetch.
- After a move nothing is decided for STEPS steps, after the next one for twice as long, and so on:
  a network that swings makes moves rarer, not plans restless.

A plan that takes far longer than it promised need not wait for a gain to last: its prediction was
wrong, not noisy. `at_once` decides by one comparison, for the same gain, if it pays as well over
what remains; at most AT_ONCE times in a run, each time after twice as many steps as before.

The move itself happens at a snapshot boundary, a few stages at a time (`in_parts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...dag.cost.network import Network
from ...dag.ir.graph import Graph
from ...dag.plan.plan import PeerId, Plan

__all__ = [
    "AT_ONCE",
    "AT_ONCE_STEPS",
    "FACTOR",
    "LEAST_GAIN",
    "STEPS",
    "Hysteresis",
    "Move",
    "in_parts",
    "migration",
]

LEAST_GAIN = 0.10
STEPS = 50
FACTOR = 3.0
AT_ONCE = 3
AT_ONCE_STEPS = 8
"""Between two moves at once, at least; then twice as many."""
SMOOTHING = 20.0
"""Steps over which a gain is smoothed: one of ±20 % noise leaves 3 % then."""


@dataclass(frozen=True, slots=True)
class Move:
    """A decision to move, with its reason."""

    gain: float
    saved_s: float
    """Over the remaining steps."""
    migration_s: float
    lasted: bool = True
    """Whether the gain did, or the plan was too slow to wait for that."""

    def __str__(self) -> str:
        lasting = f" for {STEPS} steps" if self.lasted else ""
        return (
            f"another plan is {self.gain:.0%} faster{lasting} and saves "
            f"{self.saved_s:.3g} s until the end, moving takes {self.migration_s:.3g} s"
        )


@dataclass
class Hysteresis:
    """Remembers gains, and says when to move. One per run."""

    smooth: float | None = None
    """Smoothed log of candidate over running step time."""
    since: int | None = None
    """The step since which the gain is large enough."""
    quiet_until: int = 0
    moves: int = 0
    last_step: int = field(default=-1)
    at_once_moves: int = 0
    at_once_from: int = 0
    """The step from which on another move at once may be decided."""

    def observe(
        self, step: int, running_s: float, candidate_s: float, migration_s: float, remaining: int
    ) -> Move | None:
        """Enters the predictions at a step (ascending). Raises ValueError for times that are not
        positive and finite."""
        for name, value in (("running", running_s), ("candidate", candidate_s)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"the {name} plan takes {value} s per step: expected more than 0")
        if step <= self.last_step:
            return None  # a late report
        passed = step - self.last_step if self.smooth is not None else 1
        self.last_step = step
        ratio = math.log(candidate_s / running_s)
        if self.smooth is None:
            self.smooth = ratio
        keep = math.exp(-passed / SMOOTHING)
        self.smooth = keep * self.smooth + (1 - keep) * ratio
        gain = 1 - math.exp(self.smooth)
        if gain < LEAST_GAIN:
            self.since = None
            return None
        if self.since is None:
            self.since = step
        saved = gain * running_s * remaining
        if step - self.since < STEPS or step < self.quiet_until or saved <= FACTOR * migration_s:
            return None
        return Move(gain, saved, migration_s)

    def at_once(
        self, step: int, running_s: float, candidate_s: float, migration_s: float, remaining: int
    ) -> Move | None:
        """As `observe`, for a plan that takes far longer than it promised, and whose prediction has
        been corrected since. Remembers nothing."""
        if self.at_once_moves >= AT_ONCE or step < self.at_once_from:
            return None
        gain = 1 - candidate_s / running_s
        saved = gain * running_s * remaining
        if gain < LEAST_GAIN or saved <= FACTOR * migration_s:
            return None
        return Move(gain, saved, migration_s, lasted=False)

    def moved(self, step: int, *, at_once: bool = False) -> None:
        """The run has changed to the candidate: what was known of gains is void."""
        if at_once:
            self.at_once_from = step + AT_ONCE_STEPS * 2**self.at_once_moves
            self.at_once_moves += 1
        self.quiet_until = step + STEPS * 2**self.moves
        self.moves += 1
        self.smooth = self.since = None


def migration(old: Plan, new: Plan, graph: Graph, network: Network, *, state_bytes: int) -> float:
    """Seconds in which receivers fetch parameters and optimizer state that change hands: each from
    the old holder with the best link, all at once, a peer's downlink after its own sum. `network`
    has every peer of both plans. Raises ValueError when the plans' intervals count different
    graphs."""
    if old.head_parts != new.head_parts:
        raise ValueError(
            f"the head is in {old.head_parts} blocks now and would be in {new.head_parts}: a "
            "running plan keeps its graph"
        )
    place = {peer: i for i, peer in enumerate(network.peers)}
    had = {peer: _state(old, graph, peer) for peer in old.peers}
    rates = network.rates()
    trained = frozenset(f"param:{p.name}" for p in graph.parameters if p.trainable)
    slowest = 0.0
    for peer in new.peers:
        seconds = 0.0
        for name in _state(new, graph, peer):
            if name in had.get(peer, ()):
                continue
            size = graph.spec[name].size_bytes
            if name in trained:
                size += state_bytes * graph.spec[name].elements
            sources = [place[p] for p in old.peers if name in had[p]]
            rate = max(float(rates[i, place[peer]]) for i in sources)
            seconds += size / rate
        slowest = max(slowest, seconds)
    return slowest


def in_parts(old: Plan, new: Plan, most: int = 2) -> list[tuple[PeerId, ...]]:
    """Peers of the new plan whose operators change, in groups of at most `most`, in the order of
    the new plan: what moves at each snapshot boundary."""
    changed = [p for p in new.peers if _spans(new, p) != _spans(old, p)]
    return [tuple(changed[i : i + most]) for i in range(0, len(changed), most)]


def _spans(plan: Plan, peer: PeerId) -> Sequence[tuple[int, int]]:
    """The peer's operators as intervals, neighbours joined."""
    found: list[tuple[int, int]] = []
    for k in plan.stages_of(peer):
        start, stop = plan.stages[k].start, plan.stages[k].stop
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _state(plan: Plan, graph: Graph, peer: PeerId) -> Mapping[str, None]:
    """Names of the parameters and buffers that the peer's operators read, in order."""
    spans = _spans(plan, peer)
    return {
        value: None
        for start, stop in spans
        for op in graph.operators[start:stop]
        for value in op.reads
        if value.startswith(("param:", "buffer:"))
    }
