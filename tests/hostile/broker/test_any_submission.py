"""Any submission: the machine answers once, never raises, and is made again from its journal."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.broker.events import Answer, MakePlan, PlanReady, Reject, RunSubmitted
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.job import Job, SettingsError
from shoal.proto.broker_pb2 import FAILED, RunSpec
from shoal.tests.broker.conftest import World, make_plan, make_spec
from shoal.tests.hostile.words.test_any_message import any_message

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
OURS = json.loads(make_spec().job)
PATHS = [(k,) for k in OURS] + [(k, e) for k, v in OURS.items() if isinstance(v, dict) for e in v]
TABLES = [(k,) for k in OURS]
VALUES = (None, 0, -1, 2**63, 10**30, 1e308, float("nan"), True, "", "x", "auto", "\x1b[2J",
          "x" * 500, "1e400", [], [[]], {}, {"a": 1})  # fmt: skip


def changed(path: tuple[str, ...], value: Any) -> str:
    table = at = json.loads(json.dumps(OURS))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(table)


@settings(max_examples=8, deadline=None)
@given(JSON)
@example("x")
@example(1.5)
def test_whatever_a_job_has_at_a_key_it_is_read_or_refused_by_name(value: Any) -> None:
    for path in PATHS:
        with suppress(SettingsError):
            Job.from_json(changed(path, value))


def any_submission(rng: random.Random) -> RunSpec:
    """An honest one with one or two things changed."""
    spec = make_spec(rng.choice((1, 5)), rng.choice((2, 4)))
    if rng.random() < 0.7:
        spec.job = changed(rng.choice(rng.choice((PATHS, TABLES))), rng.choice(VALUES))
    if rng.random() < 0.5:
        known = {"hash": "a" * 64, "run": "r-1"}
        field = rng.choice(RunSpec.DESCRIPTOR.fields).name
        other = any_message(rng, RunSpec, known)
        spec.ClearField(field)
        only = RunSpec()
        only.MergeFrom(other)
        for each in RunSpec.DESCRIPTOR.fields:
            if each.name != field:
                only.ClearField(each.name)
        spec.MergeFrom(only)
    return spec


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_submitted_the_machine_answers_once_and_can_be_made_again(seed: int) -> None:
    rng = random.Random(seed)
    world = World(BrokerMachine("broker-1", BrokerOptions(probe_s=0.0)))
    for name in "abc":
        world.join(name)
    for _ in range(8):
        spec = any_submission(rng)
        out = world.handle(RunSubmitted(world.request(), spec))
        assert len([i for i in out if isinstance(i, Answer | Reject)]) == 1
        for ask in (i for i in out if isinstance(i, MakePlan)):
            peers = [o.peer for o in ask.peers][:2]
            plan = make_plan(*peers, microbatches=spec.microbatches)
            world.handle(PlanReady(ask.replica, ask.version, plan))
        world.wait(rng.choice((0.0, 5.0, 100.0)))
    world.restart()


def test_a_run_in_whose_planning_the_broker_ended_twice_is_not_planned_again() -> None:
    world = World(BrokerMachine("broker-1", BrokerOptions(probe_s=0.0)))
    asked = []
    for start in range(1, 5):
        out = world.join("a", counter=start) + world.join("b", counter=start)
        if start == 1:
            run, more = world.submit()
            out += more
        out += world.wait(60.0)
        asked.append(any(isinstance(i, MakePlan) for i in out))
        world.restart()
    assert asked == [True, True, False, False]
    state = world.state(run)
    assert (state.phase, "2 times while it planned" in state.reason.text) == (FAILED, True)
