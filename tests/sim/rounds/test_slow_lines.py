"""Exchanges of rounds over lines that are slower than anybody assumed, and peers that stop in the
middle of one. Ghosts: frames are as long as those of real peers, and versions are hashes."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.benchmarks.sync.worlds import MBIT, lines
from shoal.broker.events import Publish
from shoal.net.links.outbox import PIECES
from shoal.proto.broker_pb2 import PeerMessage, RoundReport
from shoal.sim.ghost.device import GhostDevice, Ghosts
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played_rounds import Rounds, done_of, inside_of

MEMBERS = 5
NAMES = [f"p{i}" for i in range(MEMBERS)]
JOB: dict[str, Any] = {
    "version": 1,
    "name": "slow-lines",
    "model": {
        "factory": "shoal.benchmarks.sync.places:wide",
        "args": {"width": 1500, "hidden": 2800},
    },
    "data": {"kind": "text", "length": 8, "holdout": 0.0},
    "plan": {"replicas": MEMBERS, "stages": 1, "replan": False},
    "recovery": {"ladder": []},
    "sync": {"kind": "local", "every": 1, "method": "average"},
    "train": {"steps": 1, "batch": MEMBERS, "microbatch": 1, "eval_every": 0},
}
"""Of 5.3 million parameters, and one round."""
TINY = 3_872
"""Elements, about, of the small model."""
ATTEMPT_S = 60 + 16 * (256 * 1500 + 1500 * 2800 + 256 * 2800) / 1.25e6
"""Seconds that an attempt has whatever comes of it."""


class Ghost(Ghosts):
    """Frames leave in pieces as long as those of real peers."""

    def __call__(self, spec: PeerSpec) -> GhostDevice:
        device = super().__call__(spec)
        device.pieces = PIECES
        return device


@pytest.fixture(scope="module")
def slow(laboratory: Any) -> Rounds:
    return Rounds(laboratory, JOB)


def played(slow: Rounds, mbit: float, stops_s: float = 0.0) -> tuple[World, str]:
    """The world in which the job ended; `stops_s` behind the first plan, nothing goes between the
    last member and others any more."""
    wan = Wan(lines(NAMES, dict.fromkeys(NAMES, mbit * MBIT), 0.02), seed=0)
    peers = [PeerSpec(name=n, place=n, flops_per_s=1e12) for n in NAMES]

    def part() -> None:
        for name in NAMES[:-1]:
            world.part(NAMES[-1], name)

    def also(_: World, seen: Observed) -> None:
        if stops_s and isinstance(seen.record, Publish):
            planned = seen.record.event.round_planned
            if (planned.round, planned.attempt) == (0, 1):
                world.after(stops_s, part)

    world, run = slow.start(peers, wan=wan, device=Ghost(), also=also)
    slow.monitor.finish(run, 1e6)
    slow.assert_versions(world, run)
    return world, run


def first_attempt_s(world: World, run: str) -> float:
    """How long the first attempt was waited for."""
    at = [e.at_s for e in world.events(run) if e.HasField("round_planned")]
    return at[1] - at[0]


@pytest.mark.slow
@pytest.mark.parametrize("mbit", [2.0, 0.5])
def test_an_attempt_does_not_end_while_bytes_flow(slow: Rounds, mbit: float) -> None:
    world, run = played(slow, mbit)
    [done] = done_of(world, run)
    assert (done.attempt, len(done.members)) == (1, MEMBERS)
    assert done.exchange_s > ATTEMPT_S


@pytest.mark.slow
@pytest.mark.parametrize(("mbit", "stops_s", "until"), [(50.0, 2.0, ATTEMPT_S), (2.0, 40.0, 181.0)])
def test_who_stops_in_the_middle_is_found_as_soon_as_nothing_flows(
    slow: Rounds, mbit: float, stops_s: float, until: float
) -> None:
    """On fast lines when the attempt has had its time; on slow ones, on which others go on for 87
    s, behind 94 in which nothing came."""
    world, run = played(slow, mbit, stops_s)
    assert inside_of(world, run)[0] == [0, 1, 2, 3]
    assert first_attempt_s(world, run) == pytest.approx(until, rel=0.01)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt of the small model has five seconds, of which something comes 43 at most. Parts
    are short, and peers say soon that something came."""
    patches = {
        "broker.rounds.exchange_planner._EXCHANGE_S": 4.0,
        "broker.rounds.exchange_planner._USUAL_BYTES_PER_S": 16 * TINY,
        "broker.rounds.exchange_planner._LEAST_BYTES_PER_S": 16 * TINY / 39,
        "broker.policies.segments.UNDIVIDED": 64,
        "peer.core.rounds.round_exchange.SAYS_S": 0.1,
        "dag.rounds.vector._LEAST": 512,
    }
    for name, value in patches.items():
        monkeypatch.setattr(f"shoal.{name}", value)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("one", "until"), [("works", 0.0), ("stops", 14.5), ("lies", 43.0)])
def test_an_attempt_of_a_small_model_lasts_as_long_as_something_comes(
    rounds: Rounds, one: str, until: float
) -> None:
    """Of three over lines of 1.5 KB/s one stops in the middle, and perhaps says for ever that more
    and more comes to it."""
    names = NAMES[:3]
    wan = Wan(lines(names, dict.fromkeys(names, 1.5e3), 0.001), seed=0)
    peers = [PeerSpec(name=n, place=n, flops_per_s=1e12) for n in names]

    def stop(came: int) -> None:
        if not came:
            world.part("p2", "p0")
            world.part("p2", "p1")
        elif one == "lies":
            said = RoundReport(run=f"{run}.2", term=1, attempt=1, came=1000 + came)
            world.peers["p2"]._tell(PeerMessage(round=said))
        if came < 100:
            world.after(0.5, lambda: stop(came + 1))

    def also(_: World, seen: Observed) -> None:
        if one != "works" and isinstance(seen.record, Publish):
            planned = seen.record.event.round_planned
            if (planned.round, planned.attempt) == (0, 1):
                world.after(4.0, lambda: stop(0))

    sync, train = {"kind": "local", "every": 1}, {"steps": 1, "batch": 6, "eval_every": 0}
    world, run = rounds.start(
        *(peers, None, also, Ghosts(), wan), sync=sync, train=train, plan={"replicas": 3}
    )
    rounds.monitor.finish(run, 1e6)
    rounds.assert_versions(world, run)
    if one == "works":
        [done] = done_of(world, run)
        assert (done.attempt, len(done.members)) == (1, 3)
        assert done.exchange_s > 10
    else:
        assert inside_of(world, run)[0] == [0, 1]
        assert first_attempt_s(world, run) == pytest.approx(until, rel=0.01)
