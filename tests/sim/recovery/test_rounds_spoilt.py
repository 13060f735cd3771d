"""Contributions that cannot count, and versions that differ: left out and named, and the round goes
on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.broker.events import Publish
from shoal.dag.plan.action import Action, Kind
from shoal.dag.rounds.wiring import RESULT
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import FrameKey, Payload
from shoal.peer.compute.device import TorchDevice
from shoal.peer.core.events import Compute, Result
from shoal.proto.broker_pb2 import DONE
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.spec import PeerSpec
from shoal.sim.virtual.world import World
from shoal.tests.sim.played_rounds import Rounds, outcome, sites

pytestmark = pytest.mark.usefixtures("plans_once")

THREE = sites(1e7, 1e7, 1e7)
TABLES: dict[str, Any] = {
    "plan": {"replicas": 3, "stages": 1},
    "train": {"steps": 24},
    "sync": {"every": 4},
}


class Spoilt(TorchDevice):
    """Something happens to its weights in a round, before one of its actions."""

    def __init__(self, when: tuple[int, Kind], what: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.when, self.what, self.spoilt = when, what, False

    @torch.no_grad()
    def compute(self, step: int, action: Action) -> Result:
        if (step, action.kind) == self.when and not self.spoilt:
            self.spoilt = True
            self.what(next(iter(self._now.held[0].executor.parameters.values())))
        return super().compute(step, action)


def spoils(name: str, when: tuple[int, Kind], what: Callable[[torch.Tensor], Any]) -> Any:
    def device(spec: PeerSpec) -> TorchDevice:
        return Spoilt(when, what) if spec.name == name else TorchDevice()

    return device


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_left_out_and_the_replica_comes_back(
    rounds: Rounds, number: float
) -> None:
    device = spoils("p1", (2, Kind.CONTRIBUTE), lambda w: w.view(-1)[0].fill_(number))
    world, run = rounds.play(THREE, device=device, **TABLES)
    assert world.broker.ended[run].phase == DONE
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    assert [m.replica for m in done[2].members] == [0, 2], outcome(world, run)
    assert len(done[3].members) == 3 or len(done[4].members) == 3, outcome(world, run)
    [note] = [e.note for e in world.events(run) if "does not count" in e.note]
    assert "p1" in note
    assert "no finite number" in note


def test_an_element_that_is_too_large_is_another_attempt(rounds: Rounds) -> None:
    device = spoils("p1", (2, Kind.CONTRIBUTE), lambda w: w.view(-1)[0].add_(5000.0))
    world, run = rounds.play(THREE, device=device, **TABLES)
    assert world.broker.ended[run].phase == DONE
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    assert (done[2].attempt, len(done[2].members)) == (2, 3), outcome(world, run)


def test_who_makes_another_version_is_named_and_takes_that_of_the_others(rounds: Rounds) -> None:
    class Wrong(TorchDevice):
        def compute(self, step: int, action: Action) -> Result:
            result = super().compute(step, action)
            if (step, action.kind) == (1, Kind.APPLY) and result.round is not None:
                wrong = tuple(h ^ 1 for h in result.round.hashes)
                object.__setattr__(result.round, "hashes", wrong)
            return result

    world, run = rounds.play(
        THREE, device=lambda spec: Wrong() if spec.name == "p2" else TorchDevice(), **TABLES
    )
    assert world.broker.ended[run].phase == DONE
    assert any("replica 2 made another version" in e.note for e in world.events(run))
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    assert any(2 in [m.replica for m in d.joined] for d in done), outcome(world, run)


def test_who_was_late_in_a_round_that_succeeded_is_not_to_blame_for_the_next(
    rounds: Rounds,
) -> None:
    """The sum of the last stage, which replica 2 makes, comes too late for one replica's patience;
    in the next round that of the first stage, which replica 1 makes, does not come at all."""
    holders, parted = dict[int, list[str]](), set[int]()

    def part(world: World, seen: Observed) -> None:
        match seen.record:
            case Publish(event=event) if event.HasField("plan"):
                holders[event.replica] = [s.holders[0] for s in event.plan.stages]
            case Compute(step=1 | 2 as number, action=Action(Kind.EXCHANGE)):
                if number in parted:
                    return
                parted.add(number)
                for_s, stage, adds, takes = (40.0, 1, 2, 1) if number == 1 else (61.0, 0, 1, 2)
                a, b = holders[adds][stage], holders[takes][stage]
                world.part(a, b)
                world.after(for_s, lambda: world.mend(a, b))

    tables = TABLES | {"plan": {"replicas": 3, "stages": 2}}
    world, run = rounds.play(sites(*[1e7] * 6), also=part, **tables)
    rounds.assert_expected(world, run)
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    assert (done[1].attempt, len(done[1].members)) == (1, 3), outcome(world, run)
    assert done[1].waited_s > 30, "nobody waited long enough to say so"
    notes = [e.note for e in world.events(run) if "attempt 1" in e.note]
    assert notes == [
        "round 2, attempt 1: nothing goes between replicas 2 and 1: others add up what they give"
    ]
    assert [(d.attempt, len(d.members)) for d in done[2:]] == [(2, 3)] + [(1, 3)] * len(done[3:])


def test_who_adds_up_is_not_to_blame_for_a_contribution_that_does_not_come(rounds: Rounds) -> None:
    """Two wait for its sum, and it waits for what the third one gives."""
    holders, parted = dict[int, str](), list[str]()

    def part(world: World, seen: Observed) -> None:
        match seen.record:
            case Publish(event=event) if event.HasField("plan"):
                holders[event.replica] = event.plan.stages[0].holders[0]
            case Compute(step=1, action=Action(Kind.EXCHANGE)) if not parted:
                parted.extend((holders[2], holders[0]))
                world.part(*parted)
                world.after(61.0, lambda: world.mend(*parted))

    world, run = rounds.play(THREE, also=part, **TABLES)
    rounds.assert_expected(world, run)
    notes = [e.note for e in world.events(run) if "attempt 1" in e.note]
    assert notes == [
        "round 1, attempt 1: nothing goes between replicas 0 and 2: others add up what they give"
    ]
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    assert all(len(d.members) == 3 for d in done), outcome(world, run)


def test_who_gives_one_member_false_sums_adds_up_for_it_no_more(rounds: Rounds) -> None:
    """The first that is to send a sum lies to the first that gets one, again and again. Both stay,
    and what is committed is what honest ones make of it."""
    lies: list[tuple[str, str]] = []

    class Liar(TorchDevice):
        def payload(self, key: FrameKey) -> Payload:
            found = super().payload(key)
            if key.role is not Role.ROUND or key.hop != RESULT:
                return found
            pair = key.source, key.destination
            if lies and lies[0] != pair:
                return found
            lies.append(pair)
            data = torch.frombuffer(bytearray(b"".join(found.buffers)), dtype=torch.float32) + 1.0
            return replace(found, buffers=(memoryview(data.numpy().tobytes()),))

    world, run = rounds.play(THREE, device=lambda spec: Liar(), **TABLES)
    rounds.assert_expected(world, run)
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    assert 1 <= len(lies) <= 3, lies
    assert [len(d.members) for d in done[-2:]] == [3, 3], outcome(world, run)
