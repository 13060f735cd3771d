"""[plan] of a job: what goes together, and what is refused beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.job import Job, SettingsError

from .problems import problem


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"plan": {"pipelines": 2}}, "plan.pipelines"),
        ({"plan": {"schedule": "interleaved"}}, "plan.schedule"),
        ({"plan": {"schedule": "listed"}}, "plan.schedule"),
        ({"plan": {"schedule": "zero-bubble"}}, "plan.schedule"),
        ({"plan": {"in_flight": 4}}, "plan.in_flight"),
        ({"recovery": {"ladder": ["neighbour+"]}}, "recovery.ladder"),
    ],
)
def test_what_routed_microbatches_cannot_be_is_refused_by_its_key(tables: dict, key: str) -> None:
    plan = tables.get("plan", {}) | {"scheduler": "swarm"}
    with pytest.raises(SettingsError, match=f"`{key}`"):
        Job(model="a:b", steps=1, batch=8, microbatch=1, **tables | {"plan": plan})
    Job(model="a:b", steps=1, plan={"scheduler": "swarm", "schedule": "gpipe", "stages": 3})


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("in_flight = 0", "`plan.in_flight` is 0: expected 1 or more"),
        ('in_flight = 4\nschedule = "1f1b"', '"auto" is, with schedule = "1f1b"'),
        ('in_flight = 4\nscheduler = "op-fence"', '"auto" is, with scheduler = "op-fence"'),
        ('schedule = "listed"\nscheduler = "uniform"', 'are, with scheduler = "uniform"'),
        ('schedule = "zero-bubble"\nscheduler = "swarm"', 'are, with scheduler = "swarm"'),
        ('in_flight = 4\n[sync]\nkind = "local"\nevery = 2', '"auto" is, with sync.kind = "local"'),
        ('schedule = "listed"\n[recovery]\nladder = ["neighbour+"]', '"neighbour+" in recovery'),
    ],
)
def test_depth_is_for_the_planner_that_lists_visits(tmp_path: Path, plan: str, says: str) -> None:
    assert says in problem(tmp_path, f"[train]\nsteps = 3\n[plan]\n{plan}")
    Job(model="a:b", steps=1, plan={"schedule": "listed", "in_flight": 4})


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("skip = 0.6", '`plan.skip` is 0.6: expected 0 to 0.5, of the blocks, or "auto"'),
        ("skip = -0.1", "`plan.skip` is -0.1: expected 0 to 0.5"),
        ("skip = nan", "`plan.skip` is"),
        ('skip = "some"', "`plan.skip`"),
        ("reorder = 1", "`plan.reorder`"),
        ('skip_scaling = "mean"', "`plan.skip_scaling`"),
        ("skip_warmup = -1", "`plan.skip_warmup` is -1"),
        ('skip_fade_out = "few"', '`plan.skip_fade_out` is "few": expected a number of steps'),
        ("skip = 0.3\nskip_warmup = 2\nskip_fade_out = 1", "3 of 3 steps visit all stages"),
        ('reorder = true\nskip_warmup = "100%"', "3 of 3 steps visit all stages"),
        (
            'skip = 0.3\nscheduler = "swarm"',
            '0 is, with scheduler = "swarm"; to keep plan.skip, set plan.scheduler = "auto"',
        ),
        (
            'skip = "auto"\n[sync]\nkind = "local"\nevery = 2',
            '0 is, with sync.kind = "local"; to keep plan.skip, set sync.kind = "allreduce"',
        ),
        (
            'reorder = true\n[recovery]\nladder = ["neighbour+"]',
            'to keep plan.reorder, take "neighbour+" out of recovery.ladder',
        ),
        (
            "skip = 0.3\npipelines = 2",
            '1 and "auto" are, with plan.skip; to keep 2, leave plan.skip out',
        ),
        (
            'reorder = true\nschedule = "interleaved"',
            'are, and "listed" and "zero-bubble", with plan.reorder',
        ),
    ],
)
def test_routes_that_skip_are_asked_for_by_name_and_alone(
    tmp_path: Path, plan: str, says: str
) -> None:
    assert says in problem(tmp_path, f"[train]\nsteps = 3\n[plan]\n{plan}")
    for skip in (0, 0.5, "auto"):
        Job(model="a:b", steps=1, plan={"skip": skip, "reorder": True, "schedule": "zero-bubble"})


@pytest.mark.parametrize(
    ("plan", "key", "needs"),
    [
        ({"skip_warmup": "3%"}, "skip_warmup", {"reorder": True}),
        ({"skip_fade_out": 1}, "skip_fade_out", {"reorder": True}),
        ({"skip_scaling": "sum"}, "skip_scaling", {"skip": 0.2}),
        ({"skip_scaling": "sum", "reorder": True}, "skip_scaling", {"skip": "auto"}),
        ({"schedule": "interleaved", "stages": 2}, "schedule", {"stages": 3}),
        ({"schedule": "zero-bubble", "stages": 1}, "schedule", {"stages": 2}),
    ],
)
def test_what_would_change_nothing_is_refused_with_what_it_needs(
    plan: dict[str, Any], key: str, needs: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match=rf"`plan.{key}` is .*: set .* leave {key} out"):
        Job(model="a:b", tokens=50, plan=plan)
    job = Job(model="a:b", steps=50, plan=plan | needs)
    assert not replace(job, plan=job.plan.in_order).plan.reroutes
