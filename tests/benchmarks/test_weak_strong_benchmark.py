"""What a formation promises is what its rounds bring: a strong peer beside two weak ones, which
hold the model only together, with hashes in place of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shoal.benchmarks.sync.weak_strong import JOB, LINES, STRONG, WEAK, predicted
from shoal.benchmarks.sync.worlds import Field, Played, lines
from shoal.sim.ghost.device import Ghosts

PEERS = [STRONG, *WEAK[:2]]


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    train = JOB["train"] | {"steps": 100, "eval_every": 0}
    with Field(JOB | {"train": train}) as found:
        yield found


def played(field: Field, line: str, **tables: Any) -> Played:
    rate, latency_s = LINES[line]
    names = [p.name for p in PEERS]
    network = lines(names, dict.fromkeys(names, rate), latency_s)
    return field.play(PEERS, network, device=Ghosts(), **tables)


@pytest.mark.parametrize("line", LINES)
def test_rounds_train_what_their_formation_promises(field: Field, line: str) -> None:
    ran = played(field, line, plan={"replicas": 2}, sync={"kind": "local", "every": 50})
    assert len(ran.rounds) == 2
    # A strong peer counts as four times as fast as the weak ones at most, and waits for them: the
    # round hangs on their steps, whose copies of snapshots are counted as more than they are.
    assert ran.samples_per_s == pytest.approx(predicted(ran), rel=0.1 if line == "bad" else 0.05)
    assert ran.samples_per_s >= 0.97 * predicted(ran)


def test_a_line_that_eats_the_gain_leaves_the_strong_one_alone(field: Field) -> None:
    """Copies of snapshots and contributions: of the line's megabit nothing is left."""
    ran = played(field, "bad", sync={"kind": "auto"})
    told = next(e.formed for e in ran.events if e.HasField("formed"))
    assert told.kind == "allreduce"
    assert "2 replicas" in told.reasons[0]
    used = {p for e in ran.events for s in e.plan.stages for p in s.holders}
    assert used == {"strong"}
    assert ran.samples_per_s == pytest.approx(predicted(ran), rel=0.05)
