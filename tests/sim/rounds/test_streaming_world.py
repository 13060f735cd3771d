"""Streaming DiLoCo in the simulated world: fragments in turn, beside local steps, mixed into local
weights, against a plain loop that is fed with what was committed."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.broker import events as b
from shoal.dag.plan.action import Kind
from shoal.peer.core.events import Compute
from shoal.proto.broker_pb2 import DONE, RoundDone
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played_rounds import Rounds, sites


def tables(every: int = 6, **options: Any) -> dict[str, Any]:
    return {
        "sync": {
            "method": "streaming-diloco",
            "every": every,
            "options": {"bits": 32, "overlap": 0} | options,
        },
        "train": {"steps": 14},
    }


def done(world: World, run: str) -> list[RoundDone]:
    return [e.round_done for e in world.events(run) if e.HasField("round_done")]


@pytest.mark.parametrize(
    ("replicas", "overlap", "mix"),
    [
        *((2, 0, 0.0), (2, 2, 0.5), (3, 0, 0.5), (3, 2, 0.0)),
        *(
            pytest.param(*some, marks=pytest.mark.slow)
            for some in ((2, 0, 0.5), (2, 2, 0.0), (3, 0, 0.0), (3, 2, 0.5))
        ),
    ],
)
def test_the_version_is_that_of_a_plain_loop(
    rounds: Rounds, replicas: int, overlap: int, mix: float
) -> None:
    world, run = rounds.play(
        sites(*[1e9] * replicas), plan={"replicas": replicas}, **tables(overlap=overlap, mix=mix)
    )
    rounds.assert_expected(world, run)
    works = [e.round_begun.work[0] for e in world.events(run) if e.HasField("round_begun")]
    assert [(w.steps, w.fragment, w.final) for w in works] == [
        (3, 1, False),
        (3, 2, False),
        (3, 1, False),
        (3, 2, False),
        (2, 0, True),
    ]


def test_one_fragment_without_anything_else_is_diloco_bit_for_bit(rounds: Rounds) -> None:
    streaming = tables(fragments=1, mix=0.0, lr=0.7)
    diloco = streaming | {"sync": {"method": "diloco", "every": 6}}
    one, other = (done(*rounds.play(sites(1e9, 1e9), **t)) for t in (streaming, diloco))
    assert [d.hash for d in one] == [d.hash for d in other]


def test_a_round_sends_its_fragment_in_few_bits(rounds: Rounds) -> None:
    """Both blocks of this model are of one size; the rest of it goes with the first one."""
    whole, halves, few = (
        [d.sent_bytes for d in done(*rounds.play(sites(1e9, 1e9), **tables(**options)))]
        for options in ({"fragments": 1}, {}, {"bits": 4})
    )
    assert sum(halves[:2]) == whole[0] == halves[-1]
    assert halves[1] < halves[0]
    assert all(b < a / 3 for a, b in zip(halves, few, strict=True))


def test_evaluations_are_of_versions_and_local_weights_come_back(rounds: Rounds) -> None:
    played = [
        rounds.play(sites(1e9, 1e9), **tables() | {"train": {"steps": 14, "eval_every": n}})
        for n in (0, 3)
    ]
    assert [d.hash for d in done(*played[0])] == [d.hash for d in done(*played[1])]
    world, run = played[1]
    assert [e.evaluated.step for e in world.events(run) if e.HasField("evaluated")] == [
        3, 6, 9, 12, 14,
    ]  # fmt: skip


def test_a_pipeline_exchanges_fragments_with_a_single_peer(rounds: Rounds) -> None:
    weak = [PeerSpec(name=f"p{i}", place="home", memory_bytes=140_000) for i in range(2)]
    strong = PeerSpec(name="q", place="rack", memory_bytes=1 << 30)
    world, run = rounds.play([*weak, strong], **tables(overlap=2))
    replicas = world.broker.machine.runs[b.RunId(run)].record.replicas
    assert [len(r.plan.stages) for r in replicas if r.plan] == [2, 1]
    rounds.assert_expected(world, run)


ALONE: dict[str, Any] = {
    "plan": {"replicas": 3, "stages": 1},
    "recovery": {"warm_spares": 0},
    "train": {"steps": 36},
}
"""Nobody keeps copies of a replica's stages, and it is noticed before the run is over."""


@pytest.mark.parametrize("kind", [Kind.CONTRIBUTE, Kind.APPLY, Kind.LAND])
def test_who_is_lost_takes_all_fragments_from_the_others(rounds: Rounds, kind: Kind) -> None:
    dead: list[str] = []

    def die(world: World, seen: Observed) -> None:
        match seen.record:
            case Compute(step=1, action=action) if action.kind is kind and not dead:
                dead.append(seen.who)
                world.after(0.0, lambda: world.kill(seen.who))

    world, run = rounds.play(sites(*[1e7] * 4), also=die, **tables(overlap=2) | ALONE)
    assert dead
    assert world.broker.ended[run].phase == DONE, world.broker.ended[run].reason.text
    rounds.assert_expected(world, run)
    assert any(d.joined for d in done(world, run))
