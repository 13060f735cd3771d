"""Who has reported which step of a run, and what a committed step came to.

Every holder reports its steps in order, each once. A step is committed when all have reported it,
so commits are in order too. Reports ahead of the commit are bounded by `most_lead`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import LinkUse, PeerPeak, StepDone, StepReport

__all__ = ["LATELY", "ReplayedLosses", "StepLedger", "WrongStepError"]

LATELY = 3
"""Steps of which `lately_s` is the least."""

_NEWEST = 16
MOST_USES = 4096
"""Links, roles and codecs that one report may tell of; the rest is not read."""
MOST_LINKS = 512
"""Of those that a committed step tells of one by one."""


class WrongStepError(ValueError):
    """A report that cannot be: a step left out, after the end, or too far ahead."""


class StepLedger:
    """Steps [0, steps) of one term, reported by `peers` in the order in which they are summed."""

    def __init__(
        self,
        peers: tuple[PeerId, ...],
        steps: int,
        most_lead: int,
        now: float,
        committed: int = 0,
        earlier: Iterable[float] = (),
    ) -> None:
        """`earlier`: seconds of steps of the term before."""
        self.peers = peers
        self.steps = steps
        self.committed = committed
        self._most_lead = most_lead
        self._next = dict.fromkeys(peers, committed)  # The step that each peer reports next.
        self._reports: dict[int, dict[PeerId, StepReport]] = {}  # Of uncommitted steps.
        self.committed_at = now
        """When the newest step was committed, or before the first one when the term began."""
        self._seconds: deque[float] = deque(maxlen=64)  # Of the newest committed steps.
        self._earlier = tuple(earlier)
        self._peaks = dict.fromkeys(peers, 0)  # The most bytes that each has reported.

    def next_of(self, peer: PeerId) -> int:
        """The step that a peer reports next."""
        return self._next[peer]

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """Peers that have not reported the step that is committed next."""
        return tuple(p for p in self.peers if self._next[p] <= self.committed)

    @property
    def far_ahead(self) -> tuple[PeerId, ...]:
        """Peers whose reports are half of what is allowed ahead of the commit, or more."""
        least = self.committed + max(1, self._most_lead // 2)
        return tuple(p for p in self.peers if self._next[p] >= least)

    @property
    def median_s(self) -> float | None:
        """Median seconds of the newest steps, evaluations included; None before the first."""
        return median(self._seconds) if self._seconds else None

    @property
    def newest(self) -> tuple[float, ...]:
        """Seconds of the newest steps, with those of the term before while there are few: the first
        ones have the loss in them that the term began with."""
        return (*self._earlier, *self._seconds)[-_NEWEST:]

    @property
    def lately_s(self) -> float | None:
        """What each of the newest LATELY steps took at least; None before there are so many. The
        first one, which has building in it, does not count."""
        if len(self._seconds) <= LATELY:
            return None
        return min(self._seconds[i] for i in range(-LATELY, 0))

    def report(self, peer: PeerId, report: StepReport) -> bool:
        """Enters a report; False when the peer has reported this step before. Raises
        WrongStepError."""
        step, wanted = report.step, self._next[peer]
        if step < wanted:
            return False
        if step > wanted or step >= self.steps:
            raise WrongStepError(f"step {step}: expected step {wanted} of {self.steps}")
        if step - self.committed >= self._most_lead:
            raise WrongStepError(
                f"step {step} while step {self.committed} is not committed: expected a lead below "
                f"{self._most_lead} steps"
            )
        self._next[peer] = step + 1
        self._reports.setdefault(step, {})[peer] = report
        return True

    def due(self, now: float) -> StepDone | None:
        """The step to commit, which every peer has reported, with sums over peers; None if there is
        none. The outcome and the evaluation are the hub's, the only one that fills them."""
        reports = self._reports.get(self.committed, {})
        if len(reports) < len(self.peers):
            return None
        done = StepDone(step=self.committed, seconds=now - self.committed_at)
        uses: dict[tuple[str, str, str, str], LinkUse] = {}
        for peer in self.peers:  # in the plan's order, so that the sums are determined
            report = reports[peer]
            done.sent_bytes = min(done.sent_bytes + report.sent_bytes, 2**64 - 1)
            done.again_bytes = min(done.again_bytes + report.again_bytes, 2**64 - 1)
            done.compute_s += report.compute_s
            if report.peak_bytes > self._peaks[peer]:
                done.peaks.add(peer=peer, device_bytes=report.peak_bytes)
            for use in report.links[:MOST_USES]:
                if peer in (use.source, use.destination):  # of others' links it knows nothing
                    _add(uses, use)
            if report.HasField("outcome") and not done.HasField("outcome"):
                done.outcome.CopyFrom(report.outcome)
            if report.HasField("evaluation") and not done.HasField("evaluation"):
                done.evaluation.CopyFrom(report.evaluation)
        done.links.extend(_bounded(list(uses.values())))
        return done

    def commit(self, done: StepDone, at_s: float) -> None:
        """A step is committed, by `due` or by an earlier start of this broker."""
        assert done.step == self.committed, f"step {done.step}, expected step {self.committed}"
        self._reports.pop(done.step, None)
        self.committed += 1
        for peer, wanted in self._next.items():
            self._next[peer] = max(wanted, self.committed)
        self.held(done.peaks)
        self.seen(done.seconds, at_s)

    def held(self, peaks: Iterable[PeerPeak]) -> None:
        """The most that peers have held so far, bytes."""
        self._peaks.update((PeerId(p.peer), p.device_bytes) for p in peaks)

    def seen(self, seconds: float, at_s: float) -> None:
        """A step took so long, and was committed at a time."""
        self._seconds.append(seconds)
        self.committed_at = at_s

    @property
    def peaks(self) -> list[PeerPeak]:
        """The most that each peer has reported, in the plan's order; none of 0."""
        return [PeerPeak(peer=p, device_bytes=n) for p, n in self._peaks.items() if n]


def _add(uses: dict[tuple[str, str, str, str], LinkUse], use: LinkUse) -> None:
    """What one end of a link tells: the sender its bytes and encoding, the receiver its decoding.
    An error is told by one end; should both do, the larger one counts."""
    key = (use.source, use.destination, use.role, use.codec)
    found = uses.setdefault(
        key, LinkUse(source=use.source, destination=use.destination, role=use.role, codec=use.codec)
    )
    found.bytes = min(found.bytes + use.bytes, 2**64 - 1)
    found.dense_bytes = min(found.dense_bytes + use.dense_bytes, 2**64 - 1)
    found.encode_s += _sound(use.encode_s)
    found.decode_s += _sound(use.decode_s)
    found.error = max(found.error, _sound(use.error))


def _bounded(uses: list[LinkUse]) -> list[LinkUse]:
    """The MOST_LINKS with the most bytes; the others as one for each role and codec, of no link. A
    run keeps this of every step."""
    if len(uses) <= MOST_LINKS:
        return uses
    ranked = sorted(range(len(uses)), key=lambda i: (-uses[i].bytes, i))
    rest: dict[tuple[str, str, str, str], LinkUse] = {}
    for i in sorted(ranked[MOST_LINKS:]):
        uses[i].source = uses[i].destination = ""
        _add(rest, uses[i])
    return [*(uses[i] for i in sorted(ranked[:MOST_LINKS])), *rest.values()]


def _sound(reported: float) -> float:
    """A peer may report anything; what is no number from 0 on counts as 0."""
    return reported if 0 <= reported < math.inf else 0.0


# Losses of steps that were done again: on equal devices the same as before, bit for bit.

_LOSSES = 4096
"""Newest steps whose losses are compared."""


class ReplayedLosses:
    """Remembers what was told of each step."""

    def __init__(self) -> None:
        self._told: deque[tuple[int, float]] = deque(maxlen=_LOSSES)
        self._drift = 0.0
        """The largest relative difference so far."""

    def told(self, step: int, loss: float) -> None:
        self._told.append((step, loss))

    def again(self, step: int, loss: float) -> str:
        """A sentence for people where it differs by more than any before; else empty."""
        before = next((had for k, had in reversed(self._told) if k == step), None)
        if before is None or before == loss or (before != before and loss != loss):
            return ""
        drift = abs(loss - before) / max(abs(before), 1e-12)
        if drift <= self._drift:
            return ""
        self._drift = drift
        return (
            f"step {step} gave the loss {loss:.9g} when it was done again, {before:.9g} before "
            f"({drift:.1e} of it): another device, or another order of sums"
        )
