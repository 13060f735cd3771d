"""The planner may choose the number of microbatches: every choice trains on the same samples, and
so to the same losses, as far as the model's loss is a mean over samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.sim.following import Following
from shoal.sim.report import Summary
from shoal.sim.virtual.world import PeerSpec

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PEERS = [PeerSpec(name="p0"), PeerSpec(name="p1", core=True), PeerSpec(name="p2")]
BATCH = 8


@pytest.fixture(scope="session")
def lab(laboratory: Callable[[Job], Any]) -> Any:
    args = {"layers": 2, "width": 16, "heads": 2, "length": 12, "dropout": 0.0}
    job = Job.from_table(
        {
            "version": 1,
            "name": "batchings",
            "model": {"factory": "gpt.py:gpt", "args": args},
            "data": {"length": 12, "source": str(EXAMPLES / "*.py"), "holdout": 0.2},
            "train": {"steps": 6, "batch": BATCH, "lr": 1e-2, "eval_every": 3, "eval_batches": 2},
        }
    )
    return laboratory(replace(job, folder=EXAMPLES))


def plan_with(size: int, operators: int) -> Plan:
    """Two stages; two holders of the first, one of them with the core operator set."""
    p0, p1, p2 = (PeerId(p.name) for p in PEERS)
    cut, count = operators // 2, BATCH // size
    return Plan(
        stages=(StageSlot(0, cut, (p0, p1)), StageSlot(cut, operators, (p2,))),
        routes=tuple((Visit(0, (p0, p1)[m % 2]), Visit(1, p2)) for m in range(count)),
        microbatch_size=size,
        evaluation_routes=tuple((Visit(0, p1), Visit(1, p2)) for _ in range(2 * count)),
    )


def test_every_division_of_the_batch_gives_the_same_losses(lab) -> None:
    assert lab.spec.microbatch_size == 2
    assert list(lab.spec.microbatch_sizes) == [1, 4, 8]
    wanted = lab.plain()
    for size in (1, 2, 4, 8):
        plan = plan_with(size, len(lab.graph.operators))
        got = lab.train(lab.world(PEERS), plan)
        assert got.losses == pytest.approx(wanted.losses, rel=1e-5), size
        assert got.norms == pytest.approx(wanted.norms, rel=1e-4), size
        if size == 1:
            evaluations = got.evaluations
        assert got.evaluations == pytest.approx(evaluations, rel=1e-5), size
    assert wanted.losses[0] - wanted.losses[-1] > 0.1  # it did learn


def test_the_simulation_compares_with_the_division_that_the_plan_took() -> None:
    """What `shoal sim --verify` runs beside it divides the batch as the plan did."""
    plan = plan_to_proto(plan_with(4, 10))
    step = broker_pb2.StepDone(outcome=broker_pb2.Outcome(loss=2.0), seconds=1.0)

    followed = Following(Summary(name="", world="", seed=0), {})
    followed.see(broker_pb2.RunEvent(plan=plan))
    followed.see(broker_pb2.RunEvent(step=step))
    assert followed.losses == [2.0]
    assert (followed.microbatch_size, followed.microbatches) == (4, 2)
