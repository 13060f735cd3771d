"""What `shoal sim --compare` measures beside a run: jobs that may be, whatever the run's is."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.job import Job
from shoal.planner.schedulers.alternatives import ALONE
from shoal.planner.schedulers.coded import UNCOMPRESSED
from shoal.sim.report import Summary
from shoal.sim.shaped.run import COMPARED_STEPS, compared_jobs


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"plan": {"scheduler": "swarm", "stages": 3}},
        {"plan": {"skip": 0.3, "reorder": True, "skip_warmup": 4, "skip_scaling": "sum"}},
        {"plan": {"reorder": True, "skip_fade_out": 7, "stages": 5}},
        {"plan": {"schedule": "zero-bubble", "in_flight": 3, "stages": 2}},
        {"plan": {"schedule": "interleaved", "stages": 4}},
        {"recovery": {"ladder": ["neighbour+"]}},
        {"plan": {"replicas": 2}, "sync": {"kind": "local"}},
    ],
)
def test_they_are_the_job_on_one_peer_in_equal_parts_and_uncompressed(
    tables: dict[str, Any],
) -> None:
    job = Job(model="a:b", steps=9, batch=8, codec={"default": "int8"}, **tables)
    summary = Summary(name="s", world="w", seed=0, against={ALONE: 1.0}, codecs=("int8",))
    found = dict(compared_jobs(job, summary))
    assert {*found} == {ALONE, "uniform", UNCOMPRESSED}
    assert {j.train.steps for j in found.values()} == {COMPARED_STEPS}
    assert {j.codec.default for j in found.values()} == {"none"}
    assert (found[ALONE].plan.stages, found[ALONE].plan.pipelines) == (1, 1)
    assert found["uniform"].plan.scheduler == "uniform"
    assert not found["uniform"].plan.reroutes
    assert found[UNCOMPRESSED].plan.skip == job.plan.skip
