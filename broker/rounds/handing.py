"""The local work that replicas get with a round: steps by speed, the samples of these, and what
they may make ahead of the next version."""

from __future__ import annotations

from collections.abc import Sequence

from ...dag.rounds.step_seconds import at_least
from ...proto.broker_pb2 import RoundWork
from ..runs.run import Run
from .saving import is_due
from .work import steps_ahead, steps_of

__all__ = ["local_work"]


def local_work(run: Run, numbers: Sequence[int], exchange_s: float) -> list[RoundWork]:
    """That of the next round, for these replicas; those that would get no step are not in it.
    `exchange_s`: how long the last exchange took, 0: not known. Nothing changes before the event
    that says so."""
    spec, sync = run.submitted.spec, run.submitted.requirements.sync
    record = run.record.rounds
    assert record is not None, f"run {run.id} has no rounds"
    mine = {n: run.replicas[n].record for n in numbers}
    own = spec.microbatches // len(run.replicas)
    left = min(sync.steps * spec.microbatches, record.total - record.committed)
    times = at_least([r.round_step_s for r in mine.values()])
    past = {n: record.carried(n, r.term) for n, r in mine.items()}
    carried = {n: w.ahead if w else 0 for n, w in past.items()}
    steps = steps_of(left // own, times, [*carried.values()])
    chosen = {n: h for n, h in zip(numbers, steps, strict=True) if h}
    saves = is_due(run, record.committed + left)  # a snapshot has the version alone then
    ahead = steps_ahead(
        0 if saves else sync.overlap,
        sync.steps,
        chosen,
        left=(record.total - record.committed - left) // own - len(run.replicas),
        exchange_s=exchange_s,
        round_s=max(h * s for h, s in zip(steps, times, strict=True)),
    )
    final = record.committed + left >= record.total
    fragment = 0 if final or sync.fragments == 1 else record.round % sync.fragments + 1
    counts = [h - carried[n] for n, h in chosen.items()] + [ahead[n] for n in chosen]
    kept = [r for w in past.values() if w for r in w.ahead_samples]
    ranges = record.hand_out((count * own for count in counts), kept)
    firsts = {n: max(r.committed, record.gate(n, r.term)) for n, r in mine.items()}
    found = []
    for i, (n, h) in enumerate(chosen.items()):
        before = past[n]
        found.append(
            RoundWork(
                replica=n,
                term=mine[n].term,
                first_step=before.first_step + before.steps if before else firsts[n],
                steps=h,
                samples=[*(before.ahead_samples if before else ()), *ranges[i]],
                ahead=ahead[n],
                ahead_samples=ranges[len(chosen) + i],
                late=carried[n],
                fragment=fragment,
                final=final,
            )
        )
    return found
