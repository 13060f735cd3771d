"""What a replica that lost time in a round makes of its work, so that others hardly wait. Pure."""

from __future__ import annotations

import math

from ...proto.broker_pb2 import RoundWork
from ..records.work_ledger import first_of

__all__ = ["shortened"]


def shortened(work: RoundWork, least: int, late_s: float, step_s: float, waiting: int) -> RoundWork:
    """Return the work without its last steps; their samples are handed out again with a later
    round. `late_s`: seconds by which it would end behind the others, of whom `waiting` wait. A step
    more is left out as long as that costs less than all of them waiting for it. `least`: so many
    steps it has made already. Work that overlaps with that of another round stays as it is, and so
    do clients, who are trained to their end or not at all."""
    found = RoundWork()
    found.CopyFrom(work)
    if not (late_s > 0 and step_s > 0 and waiting) or work.ahead or work.late or work.cohort:
        return found
    most = math.ceil(late_s / step_s - 1 / waiting)
    steps = max(1, least, work.steps - max(0, most))
    if steps >= work.steps:
        return found
    count = sum(s.count for s in work.samples) // work.steps * steps
    del found.samples[:]
    found.samples.extend(first_of(work.samples, count))
    found.planned = work.planned or work.steps
    found.steps = steps
    return found
