"""How fast the broker takes a peer to be: what its profile says, made possible, and corrected by
what its steps took.

- A profile comes from outside. A speed that no device has is clamped, one that is no number is
  replaced, and each time people are told.
- The prediction of a peer's compute per step is compared with what it reports. The factor between
  the two is an exponential mean of the median of the last few, in logarithms: one step that was
  disturbed moves nothing, and a device that is always twice as slow is soon known as such. It holds
  for one start of the peer's process; the next plan reads it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ...dag.cost.speed import Speeds
from ...planner.base.interface import DEFAULT_FLOPS_PER_S
from ...proto.broker_pb2 import Profile, StepReport
from .bounds import bounded, named

__all__ = ["MOST_BYTES_PER_S", "MOST_FACTOR", "MOST_FLOPS_PER_S", "Correction", "speeds_of"]

MOST_FLOPS_PER_S = 2e15
MOST_BYTES_PER_S = 2e13
LEAST_PER_S = 1e5
"""FLOP/s or bytes/s; a microcontroller."""
MOST_CALL_S = 0.1
LEAST_BUSY = 0.1
MOST_FACTOR = 16.0
"""A peer is taken to be at most so many times slower, or faster, than it says."""
MOST_SLOWED = 1e3
"""Times that a peer may say it was slowed down by: simulated peers are."""
MEMORY = 5
"""Steps of which the median counts."""
ENOUGH = 3
"""Steps before anything is corrected."""
WEIGHT = 0.2
"""Of the newest in the exponential mean."""
LEAST_SHARE = 0.25
"""Of the compute of the plan's busiest peer. What a peer with less takes hangs on what no class of
work counts: a peer of one embedding seemed 3 times faster than it is in everything else."""

_CLASSES = (
    ("product", "product_flops_per_s", MOST_FLOPS_PER_S, "FLOP/s"),
    ("convolution", "convolution_flops_per_s", MOST_FLOPS_PER_S, "FLOP/s"),
    ("attention", "attention_flops_per_s", MOST_FLOPS_PER_S, "FLOP/s"),
    ("memory", "memory_bytes_per_s", MOST_BYTES_PER_S, "B/s"),
    ("special", "special_bytes_per_s", MOST_BYTES_PER_S, "B/s"),
)


def speeds_of(profile: Profile) -> tuple[Speeds, tuple[str, ...]]:
    """The speeds to plan with, and a sentence for each number that could not be taken as it is.
    Never raises: whatever a profile says, a peer can be planned for."""
    who, notes = named(profile), list[str]()

    def speed(value: float, most: float, what: str, unit: str) -> float:
        said = f"{who} reports {value:g} {unit} of {what}"
        return bounded(value, LEAST_PER_S, most, said, notes)

    # What is said of matrix products stands for what is not said.
    stated = speed(profile.flops_per_s, MOST_FLOPS_PER_S, "compute", "FLOP/s")
    found: dict[str, float] = {}
    if profile.HasField("speeds"):
        for name, key, most, unit in _CLASSES:
            found[name] = speed(getattr(profile.speeds, key), most, name, unit)
    base = found.get("product") or stated
    if not base:
        base = DEFAULT_FLOPS_PER_S
        notes.append(f"{who} does not say how fast it computes: {base:g} FLOP/s are assumed")
    rest = Speeds.of_flops(base)
    taken = {n: found.get(n) or min(getattr(rest, n), most) for n, _, most, _ in _CLASSES}
    call_s, error = profile.speeds.call_s, profile.speeds.error
    if not 0 <= call_s <= MOST_CALL_S:  # NaN neither
        kept = MOST_CALL_S if call_s > MOST_CALL_S else 0.0
        notes.append(f"{who} reports {call_s:g} s for each kernel: {kept:g} s are taken")
        call_s = kept
    error = min(error, MOST_FACTOR) if 0 <= error < math.inf else 0.0
    busy = profile.speeds.busy
    busy = busy if LEAST_BUSY <= busy <= 1 else 1.0  # NaN and 0: nothing is known
    slowed = profile.speeds.slowed
    slowed = min(slowed, MOST_SLOWED) if 1 <= slowed < math.inf else 1.0
    return Speeds(**taken, call_s=call_s, error=error, busy=busy, slowed=slowed), tuple(notes)


@dataclass(slots=True)
class Correction:
    """The correction of a peer's speeds, for one start of its process. `factor`: how many times
    longer it takes than its speeds say. `error`: |predicted - measured| / measured, before
    correction, as an exponential mean; None before the first step."""

    factor: float = 1.0
    error: float | None = None
    steps: int = 0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def observe(self, measured_s: float, predicted_s: float) -> None:
        """A step's compute, and what the peer's own speeds predict of it. Numbers that are not
        positive are not taken."""
        if not (0 < measured_s < math.inf and 0 < predicted_s < math.inf):
            return
        ratio = measured_s / predicted_s
        error = min(abs(predicted_s - measured_s) / measured_s, MOST_FACTOR)
        self.error = error if self.error is None else self.error + WEIGHT * (error - self.error)
        most = math.log(MOST_FACTOR)
        self._recent.append(min(max(math.log(max(ratio, 1e-9)), -most), most))
        self.steps += 1
        if self.steps < ENOUGH:
            return
        now = math.log(self.factor)
        # The first time the median stands alone: there is nothing to smooth it with.
        weight = 1.0 if self.steps == ENOUGH else WEIGHT
        self.factor = math.exp(now + weight * (median(self._recent) - now))

    def report(
        self, report: StepReport, predicted_s: float, learned: float, most_s: float = 0.0
    ) -> None:
        """A step's report, and the compute seconds of the plan, which was made when the factor was
        `learned`; 0: with another peer in its place, of which nothing is learned. `most_s`: those
        of the plan's busiest peer. The first step warms up and does not count; nor does a report
        without its stages' times, or of a peer that has next to nothing to do."""
        if report.step == 0 or not report.stages or not learned:
            return
        if predicted_s < LEAST_SHARE * most_s:
            return
        measured_s = sum(t.forward_s + t.backward_s for t in report.stages) + report.update_s
        self.observe(measured_s, predicted_s / learned)
