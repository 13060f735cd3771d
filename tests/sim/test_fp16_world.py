"""fp16 in whole worlds: as the plain loop, and after any death the same scales and skipped steps,
bit for bit, as if nobody had died."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.proto.broker_pb2 import DONE
from shoal.tests.sim.played import sampled_by_kind
from shoal.tests.sim.recovery.test_recovery import JOB, Lab, Recovered

STEPS = 7
SCALED = {
    **JOB,
    "name": "scaled",
    "model": {
        **JOB["model"],
        "args": {**JOB["model"]["args"], "dropout": 0.0},
        "dtype": "fp16",
    },
    "train": {
        **JOB["train"],
        "steps": STEPS,
        "loss_scale": {"init_scale": 2.0**20, "growth_interval": 1},
    },
}
"""The scale is halved until nothing overflows, and then doubled at once."""


class Scaled(Lab):
    """Each stage on one peer: whoever is lost, another one goes on from snapshots."""

    job = SCALED


class Siblings(Scaled):
    """Each stage on two peers: who is left makes the step under way anew, from what it has."""

    peers = 4

    def plan_of(self, operators: int) -> Plan:
        p0, p1, p2, p3 = map(PeerId, ("p0", "p1", "p2", "p3"))
        middle = operators // 2
        slots = (StageSlot(0, middle, (p0, p2)), StageSlot(middle, operators, (p1, p3)))
        routes = (Visit(0, p0), Visit(1, p1)), (Visit(0, p2), Visit(1, p3))
        return Plan(slots, routes, 2, evaluation_routes=routes)


@pytest.fixture(scope="module")
def labs(laboratory: Any, plans_once: None) -> dict[str, Lab]:
    return {"snapshots": Scaled(laboratory), "siblings": Siblings(laboratory)}


def scales(played: Recovered) -> list[tuple[float, bool]]:
    done = [e.step.outcome for e in played.events if e.HasField("step")]
    return [(o.loss_scale, o.skipped) for o in done]


@pytest.mark.parametrize("kind", ["snapshots", "siblings"])
def test_a_world_has_the_scales_of_the_plain_loop(labs: dict[str, Lab], kind: str) -> None:
    lab = labs[kind]
    wanted = lab.laboratory.plain()
    events = [e.step.outcome for e in lab.calm.events if e.HasField("step")]
    assert [o.loss_scale for o in events] == wanted.scales
    skipped = [o.skipped for o in events]
    assert [o.loss for o in events] == pytest.approx(wanted.losses, rel=2e-3)
    assert {*skipped[1:]} == {True, False}, "the test shows too little"


@pytest.mark.parametrize(("kind", "name"), [("snapshots", "p1"), ("siblings", "p2")])
def test_after_a_death_scales_and_weights_are_the_same_bits(
    labs: dict[str, Lab], kind: str, name: str
) -> None:
    lab = labs[kind]
    for at in range(lab.calm.begun, lab.calm.records, 173):
        check(lab, name, at)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "name"), [("snapshots", "p0"), ("snapshots", "p1"), ("siblings", "p0")]
)
def test_after_a_death_at_every_kind_of_moment(labs: dict[str, Lab], kind: str, name: str) -> None:
    lab = labs[kind]
    begun = lab.calm.begun
    for i in sampled_by_kind(lab.calm.kinds[begun - 1 :], 1):
        check(lab, name, begun + i)


def check(lab: Lab, name: str, at: int) -> None:
    played = lab.play({at: name})
    where = f"{name} at {at} ({lab.calm.moments[at - 1]})"
    assert played.end.phase == DONE, where
    assert scales(played) == scales(lab.calm), where
    lab.assert_same(played, where)
