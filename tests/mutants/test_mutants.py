"""Each planted bug is caught by the monitor, and the same world without it is clean."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from shoal.broker import events as b
from shoal.dag.plan.cut import cut
from shoal.dag.plan.plan import CodecChoice, PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.dag.schedule.flow import Role
from shoal.job import Job
from shoal.net.transports.memory import steady
from shoal.peer.core import events as p
from shoal.proto import broker_pb2
from shoal.sim.faults.faults import Faults
from shoal.sim.monitor.monitor import Monitor, Violation
from shoal.sim.monitor.violation import Broken
from shoal.sim.scenario.sentences import broker_restart, flap, kill
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.world import World
from shoal.tests.mutants.planted import MUTANTS, Mutant, own_clock

STEPS = 4
JOB = Job.from_table(
    {
        "version": 1,
        "name": "mutants",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 1, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 8},
        "train": {
            **{"steps": STEPS, "batch": 4, "microbatch": 1, "lr": 0.02, "eval_every": 0},
            **{"schedule": "constant", "warmup": 0},
        },
    }
)
KINDS = sorted({m.brings for m in MUTANTS})


@pytest.fixture(scope="module")
def lab(laboratory: Any) -> Any:
    made = laboratory(JOB)
    made.wanted = made.plain()
    return made


def plan_of(lab: Any, codec: str = "") -> Plan:
    """Stage 0 on p0, stage 1 on p1 and p2, two values across the cut."""
    bound, n = lab.graph.bind(1), len(lab.graph.operators)
    for at in range(n // 3, n):
        first, second = cut(bound, [(0, at), (at, n)])
        if first.has_backward and second.has_backward and len(first.sends) > 1:
            break
    else:
        pytest.fail("no cut with two values across it")
    p0, p1, p2 = (PeerId(f"p{i}") for i in range(3))
    return Plan(
        stages=(StageSlot(0, at, (p0,)), StageSlot(at, n, (p1, p2))),
        routes=tuple((Visit(0, p0), Visit(1, q)) for q in (p1, p2, p1, p2)),
        microbatch_size=1,
        codecs=(CodecChoice(p1, p2, "sync", codec), CodecChoice(p2, p1, "sync", codec))
        if codec
        else (),
    )


def play(lab: Any, brings: str) -> World:
    """A world in which what brings a bug out happens. Raises Violation."""
    feedback = brings == "feedback"
    world = lab.world(3, carry=steady(0.005, 1e5 if brings == "pieces" else 1e8))
    exact = {} if feedback else {"losses": lab.wanted.losses, "norms": lab.wanted.norms}
    terms = 2 if brings == "death" else 1
    monitor = Monitor(world, seed=1, tolerance=1e-4, most_terms=terms, **exact)
    faults = {
        "cut": [flap("p0", "p1", for_s=2.0, at_step=1, phase="backward")],
        "death": [kill("p1", at_step=1, phase="backward")],
        "restart": [broker_restart(at_step=1, phase="backward")],
    }
    Faults(world, faults.get(brings, [])).start()
    if brings.startswith("old"):
        before, told = world.observe, []

        def also(seen: Observed) -> None:
            before(seen)
            again = old(seen, brings)
            if again is not None and not told:
                told.append(again)
                shell = world.broker if seen.who == BROKER else world.peers[again.key.destination]
                world.after(0.0, lambda: shell.handle(again))

        world.observe = also
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(lab.spec)
    spec.plan.CopyFrom(plan_to_proto(plan_of(lab, "ef+topk:ratio=4" if feedback else "")))
    run = world.submit(spec)
    # Small pieces: a frame takes several messages, as large ones do.
    pieces = 1024 if brings == "pieces" else 64 * 1024
    with (
        patch("shoal.net.links.outbox.MIN_CHUNK_BYTES", pieces),
        patch("shoal.net.links.link.MIN_CHUNK_BYTES", pieces),
    ):
        last = monitor.finish(run)[-1].state
    if last.phase != broker_pb2.DONE:
        raise monitor.violation(Broken("I9", last.reason.text))
    return world


def old(seen: Observed, brings: str) -> Any:
    """A frame or a report as it would be in the term before, once, in the middle of the run."""
    match seen.record:
        case p.SendFrame(key) if brings == "old frame" and key.step == 1:
            if key.role is Role.SNAPSHOT:  # those have rules of their own
                return None
            return p.FrameArrived(key._replace(term=key.term - 1))
        case b.PeerSaid(stream, message) if brings == "old report" and message.step.step == 1:
            late = broker_pb2.PeerMessage()
            late.CopyFrom(message)
            late.step.step += 1
            late.step.term -= 1
            return b.PeerSaid(stream, late)
    return None


@pytest.mark.parametrize("brings", KINDS)
def test_a_world_without_a_bug_is_clean(lab: Any, brings: str) -> None:
    play(lab, brings)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.plant.__name__)
def test_a_planted_bug_is_caught(lab: Any, mutant: Mutant) -> None:
    with mutant.plant(), pytest.raises(Violation) as caught:
        play(lab, mutant.brings)
    assert caught.value.invariant in mutant.invariants, str(caught.value)
    assert "seed 1" in str(caught.value)


def test_there_are_a_dozen_and_each_invariant_that_can_be_seen_has_one() -> None:
    assert len(MUTANTS) >= 12
    assert {i for m in MUTANTS for i in m.invariants} >= {
        "I1",
        "I2",
        "I3",
        "I4",
        "I5",
        "I8",
        "I9",
        "I10",
    }


def test_a_machine_with_a_clock_of_its_own_makes_two_worlds_differ(lab: Any) -> None:
    assert play(lab, "").log == play(lab, "").log
    with own_clock():
        first, second = play(lab, "").log, play(lab, "").log
    assert first != second
