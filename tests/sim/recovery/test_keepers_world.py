"""Who keeps the copies of a run follows who is there, so that its work is not lost.

Peers come and go at random, while one or two others train. Whenever somebody else has been there
for longer than a set takes, the loss of a holder costs the steps since then at most, and a holder
that leaves in good order costs none.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.broker.validate import validate
from shoal.job import Job
from shoal.proto.broker_pb2 import WAITING
from shoal.sim.ghost.device import Ghosts
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.recovery.test_handing import JOB

SET_S = 3.0
"""More than what a set takes here: half a second of pause, its step, and its way to the keeper."""
MOMENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ("join", "join", "kill spare", "cut spare", "leave spare", "kill", "leave")
        ),
        st.floats(0.0, 3 * SET_S),
    ),
    min_size=4,
    max_size=16,
)


def job_of(stages: int, **tables: Any) -> Job:
    """One that goes on for as long as it is looked at."""
    train = JOB["train"] | {"steps": 100_000, "eval_every": 0}
    plan = {"stages": stages, "pipelines": 1, "replan": False}
    return Job.from_table(JOB | {"name": f"kept {stages}", "train": train, "plan": plan} | tables)


class Play:
    """A run of `stages` holders that goes on for as long as it is looked at."""

    def __init__(self, laboratory: Any, stages: int, **tables: Any) -> None:
        lab = laboratory(job_of(stages, **tables))
        specs = [PeerSpec(name=f"p{i}", flops_per_s=2e6) for i in range(stages)]
        self.world: World = lab.world(specs, device=Ghosts(), log=False)
        self.monitor, self.stages, self.next = Monitor(self.world), stages, stages
        self.run = self.world.submit(lab.spec)
        self.machine = self.world.broker.machine
        self.leaving = set[str]()
        self.since = dict[str, float]()
        """Since when others than the holders have been there, undisturbed."""
        self.until_it_trains()

    @property
    def record(self) -> Any:
        return self.machine.replica(self.run).record

    @property
    def others(self) -> list[str]:
        alive = (n for n, p in self.world.peers.items() if p.alive and n not in self.leaving)
        return [n for n in alive if n not in self.record.peers]

    def until_it_trains(self) -> None:
        term = self.record.term
        self.monitor.until(lambda: self.record.running and self.record.term >= term)
        at = self.record.committed
        self.monitor.until(lambda: self.record.running and self.record.committed > at)

    def wait(self, seconds: float) -> None:
        until = self.world.now + seconds
        self.world.after(seconds, lambda: None)
        self.monitor.until(lambda: self.world.now >= until)

    def join(self) -> None:
        name, self.next = f"p{self.next}", self.next + 1
        self.world.join(PeerSpec(name=name, flops_per_s=2e6))
        self.since[name] = self.world.now

    def ripe(self) -> list[str]:
        """Others that had the time to get copies."""
        return [p for p in self.others if self.world.now - self.since.get(p, 0.0) > SET_S]

    def lose(self, how: str) -> None:
        """A holder goes; what is lost is what was made since the last sets."""
        validate(self.machine)
        ripe, term, peer = self.ripe(), self.record.term, self.record.peers[-1]
        step_s, now = self.record.step_s or 0.0, self.world.now
        self.leaving.add(peer)
        if not self.others:
            self.join()  # somebody has to go on
        (self.world.kill if how == "kill" else self.world.leave)(peer)
        self.monitor.until(lambda: self.record.term > term and self.record.running)
        begun, committed = (
            self.machine.replica(self.run).context.term.begun_from,
            self.record.committed,
        )
        first = begun.step if begun else 0
        if ripe and how == "leave":
            assert first == committed, f"{committed - first} steps again behind {ripe} at {now:g} s"
        if ripe:
            most = SET_S / step_s + 2
            assert committed - first <= most, f"{committed - first} steps lost beside {ripe}"
        self.since = {p: self.world.now for p in self.others}
        self.until_it_trains()

    def do(self, what: str) -> None:
        warm = self.machine.replica(self.run).context.plan.warm
        spare = next((p for p in (*warm, *self.others) if p in self.others), None)
        match what:
            case "join" if len(self.others) < 3:
                self.join()
            case "kill" | "leave":
                self.lose(what)
            case "kill spare" if spare:
                self.world.kill(spare)
            case "leave spare" if spare:
                self.leaving.add(spare)
                self.world.leave(spare)
            case "cut spare" if spare:
                self.world.cut(spare)
        if what.endswith("spare"):  # another one has to get its copies now
            self.since = {p: self.world.now for p in self.others}


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whoever_is_there_for_a_while_keeps_what_was_done(
    laboratory: Any, plans_once: None, stages: int
) -> None:
    @settings(max_examples=8, deadline=None, phases=[Phase.generate])
    @given(MOMENTS)
    def play(moments: list[tuple[str, float]]) -> None:
        played = Play(laboratory, stages)
        for what, wait_s in moments:
            played.do(what)
            played.wait(wait_s)
        played.lose("kill")

    play()


def test_a_run_keeps_its_copies_while_another_waits_that_could_not_begin(
    laboratory: Any, plans_once: None
) -> None:
    """With fewer peers than the other needs, a free one keeps; with enough, the other begins."""
    played = Play(laboratory, 1)
    other = played.world.submit(laboratory(job_of(3)).spec)
    played.join()
    played.wait(4 * SET_S)
    assert played.machine.replica(other).record.phase == WAITING
    played.lose("kill")
    played.wait(2 * SET_S)
    played.lose("leave")
    played.join()
    played.wait(SET_S)
    assert played.machine.replica(other).record.phase == WAITING
    waiting = played.machine.replica(other).record
    played.join()
    played.join()
    played.monitor.until(lambda: waiting.running)
    assert played.record.running
    assert not set(waiting.peers) & set(played.record.peers)
