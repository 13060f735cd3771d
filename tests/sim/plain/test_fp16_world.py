"""fp16 in whole worlds: as the plain loop, and after any death the same scales and skipped steps,
bit for bit, as if nobody had died."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE, RunEvent
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played import sampled_by_kind
from shoal.tests.sim.recovery import test_checkpoints
from shoal.tests.sim.recovery.test_recovery import JOB, Lab, Recovered

STEPS = 7
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
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
    return scales_of(played.events)


def scales_of(events: list[RunEvent]) -> list[tuple[float, bool]]:
    done = [e.step.outcome for e in events if e.HasField("step")]
    return [(o.loss_scale, o.skipped) for o in done]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["snapshots", "siblings"])
def test_a_world_has_the_scales_of_the_plain_loop(labs: dict[str, Lab], kind: str) -> None:
    lab = labs[kind]
    wanted = lab.laboratory.plain()
    events = [e.step.outcome for e in lab.calm.events if e.HasField("step")]
    assert [o.loss_scale for o in events] == wanted.scales
    skipped = [o.skipped for o in events]
    assert [o.loss for o in events] == pytest.approx(wanted.losses, rel=2e-3)
    assert {*skipped[1:]} == {True, False}, "the test shows too little"


@pytest.mark.slow
@pytest.mark.timeout(300)
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


class Kept(test_checkpoints.Lab):
    """With a checkpoint after every second step."""

    job = SCALED | {
        "name": "scaled-checkpoints",
        "plan": test_checkpoints.JOB["plan"],
        "output": test_checkpoints.JOB["output"],
    }


@pytest.fixture(scope="module")
def kept(laboratory: Any) -> tuple[Kept, World]:
    lab = Kept(laboratory)
    world = lab.world()
    Monitor(world).finish(world.submit(lab.spec()), 3600.0)
    return lab, world


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_others_go_on_from_a_checkpoint_with_its_scale(
    kept: tuple[Kept, World], stages: int
) -> None:
    lab, calm = kept
    before = calm.events(test_checkpoints.only(calm))
    (found,) = (c for c in test_checkpoints.checkpoints(before) if c.step == 4)
    peers = [PeerSpec(name=f"other-{i}") for i in range(stages + 1)]
    world = lab.world(peers, saved=calm)
    plan = {"scheduler": "uniform", "stages": stages}
    events = Monitor(world).finish(world.submit(lab.spec(found, plan=plan)), 3600.0)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    assert scales_of(events) == scales_of(before)[4:]
    wanted = test_checkpoints.losses(before, 4)
    assert test_checkpoints.losses(events) == pytest.approx(wanted, rel=1e-3)


def check(lab: Lab, name: str, at: int) -> None:
    played = lab.play({at: name})
    where = f"{name} at {at} ({lab.calm.moments[at - 1]})"
    assert played.end.phase == DONE, where
    assert scales(played) == scales(lab.calm), where
    lab.assert_same(played, where)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft
@pytest.mark.parametrize("base", ["float32", "float16"])
def test_an_adapter_is_trained_as_peft_trains_it(laboratory: Any, base: str) -> None:
    """Of a model of transformers over three peers, in one process the same by peft and torch."""
    pytest.importorskip("peft")
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "dtype": base}
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    job = Job.from_table(
        {
            "version": 1,
            "name": f"scaled-adapter-{base}",
            "model": {"factory": "hf:hf_llama", "lora": lora, "args": sizes, "dtype": "fp16"},
            "data": {"length": 12, "source": str(EXAMPLES / "*.py")},
            "train": {
                **{"steps": 10, "batch": 8, "microbatch": 2, "lr": 0.01, "eval_every": 0},
                "loss_scale": {"init_scale": 2.0**20, "growth_interval": 2},
            },
            "plan": {"stages": 3, "pipelines": 1},
        }
    )
    lab = laboratory(replace(job, folder=EXAMPLES))
    world = lab.world(3)
    got, wanted = lab.train(world), lab.plain()
    skipped = [not math.isfinite(norm) for norm in wanted.norms]
    assert {*skipped} == {True, False}, "the test shows too little"
    assert [not math.isfinite(norm) for norm in got.norms] == skipped
    assert got.losses == pytest.approx(wanted.losses, rel=3e-3)
    trained = [n for n in wanted.weights if ".lora_" in n]
    assert trained
    for name in trained:
        a, b = got.weights[name], wanted.weights[name]
        assert float((a - b).norm()) <= 2e-2 * float(b.norm()), name
