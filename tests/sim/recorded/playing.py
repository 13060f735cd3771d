"""Plays a named world, with plans that are searched for or fed in."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.dag.plan.plan import Plan
from shoal.dag.schedule.convert_plan import plan_from_proto
from shoal.job import Job
from shoal.peer.core import events as p
from shoal.proto.broker_pb2 import DONE, RunEvent, RunSpec
from shoal.sim.ghost.device import Ghosts
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.trace import Trace
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import World
from shoal.tests.sim.conftest import Laboratory

from .fed import Answers, feeding, searching
from .named_worlds import JOB, MODELS, NamedWorld, carry, peers_of

MODEL = """
from torch import nn
from shoal.examples.gpt import VOCABULARY, gpt

tied = gpt

def untied(layers, width):
    model = gpt(layers, width, 2, 8, 0.0)
    model.head = nn.Linear(width, VOCABULARY)
    return model
"""


class Laboratories:
    """The captured models of all named worlds, each captured once. Their text is drawn from a seed:
    no Python and no example of ours is in it."""

    def __init__(self, make: Callable[[Job], Laboratory], folder: Path) -> None:
        self._make, self._folder = make, folder
        rng = random.Random(0)
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
        (folder / "text.txt").write_text(" ".join(rng.choices(words, k=4000)))
        (folder / "model.py").write_text(MODEL)

    def of(self, world: NamedWorld) -> Laboratory:
        """The laboratory of a world, with its job."""
        name, args = MODELS[world.model]
        model = {"factory": f"{self._folder / 'model.py'}:{name}", "args": args}
        data = JOB["data"] | {"source": str(self._folder / "text.txt")}
        base = JOB | {"name": f"recorded {world.model}", "model": model, "data": data}
        found = copy.copy(self._make(Job.from_table(base)))
        train = JOB["train"] | world.tables.get("train", {})
        job = Job.from_table(base | world.tables | {"train": train})
        found.job = replace(job, folder=found.job.folder)
        found.spec = spec_of(found)
        return found


def spec_of(lab: Laboratory) -> RunSpec:
    """The run's spec with the laboratory's job in place of the one that it was captured with."""
    spec = RunSpec()
    spec.CopyFrom(lab.spec)
    spec.job, spec.steps = lab.job.to_json(), lab.job.train.steps or 0
    spec.microbatches = lab.job.train.microbatches
    return spec


@dataclass(frozen=True)
class PlayedWorld:
    """A run that came to its end, with the answers that its broker had."""

    world: World
    run: str
    events: Sequence[RunEvent]
    answers: Answers

    @property
    def plans(self) -> list[Plan]:
        """Those that it went by; of several replicas, those that it began with."""
        ran = [plan_from_proto(e.plan) for e in self.events if e.HasField("plan")]
        return self.answers.plans if "formation" in self.answers.tables[0] else ran

    @property
    def seconds(self) -> float:
        """The world's seconds of all rounds, or else of all steps but the first of each term."""
        rounds = [e.round_done.seconds for e in self.events if e.HasField("round_done")]
        steps = [(e.term, e.step.seconds) for e in self.events if e.HasField("step")]
        begun = {term: n for n, (term, _) in reversed(list(enumerate(steps)))}
        later = [s for n, (term, s) in enumerate(steps) if begun[term] != n]
        return sum(rounds) or sum(later)


def played(
    lab: Laboratory,
    named: NamedWorld,
    given: Answers | None = None,
    *,
    ghosts: bool = False,
    check: bool = True,
) -> PlayedWorld:
    """Plays to the end, every invariant watched with `check`. `given`: in place of a search."""
    answers = Answers() if given is None else given
    with searching(answers) if given is None else feeding(answers):
        options: dict[str, Any] = {"device": Ghosts()} if ghosts else {}
        world = lab.world(peers_of(named), log=False, trace=Trace(), carry=carry, **options)
        end = Monitor(world) if check else world
        world.until(lambda: len(world.broker.machine.members.pool) == named.peers)
        run = world.submit(lab.spec)
        also, waits = world.observe, dict(named.dies)

        def observe(seen: Observed) -> None:
            if also is not None:
                also(seen)
            replica = world.broker.machine.replica(run)
            if replica is None or not isinstance(seen.record, p.Computed):
                return
            for stage, step in list(waits.items()):
                if replica.record.committed >= step and replica.record.plan is not None:
                    del waits[stage]
                    world.kill(replica.record.plan.stages[stage].holders[0])

        world.observe = observe
        events = end.finish(run)
    last = world.broker.ended[run]
    assert last.phase == DONE, last.reason.text
    assert not waits, f"holders of stages {list(waits)} did not die"
    return PlayedWorld(world, run, events, answers)
