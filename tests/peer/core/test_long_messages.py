"""What a peer tells in one message is bounded: the broker ends the stream of who sends longer ones.

The oracle is the broker's own limit, and for what is left out a plain sort.
"""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.machine import MOST_MESSAGE_BYTES
from shoal.broker.snapshots.sets import MOST_SNAPSHOTS
from shoal.dag.plan.plan import PeerId
from shoal.peer.core import events as e
from shoal.peer.core.attachment import _SNAPSHOTS_TOLD
from shoal.peer.core.machine import PeerMachine
from shoal.peer.core.reports import fitting, heaviest
from shoal.peer.core.snapshots import SnapshotId
from shoal.peer.shell.control import _WAITING
from shoal.peer.shell.workbench import said_of
from shoal.proto import broker_pb2
from shoal.tests.peer.scripted import WELCOME, Make, finish_step, told

LONGEST = "n" * 128
"""Of an id that the broker takes."""


def uses(count: int, seed: int = 0) -> list[broker_pb2.LinkUse]:
    """Of a hub: what it sends to so many holders, and decodes of theirs."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        there = f"{i}-{LONGEST}"[:128]
        role, codec = "activation_grad", "topk:ratio=100,feedback=1/1"
        out = {"source": LONGEST, "destination": there, "bytes": rng.randrange(2**40)}
        back = {"source": there, "destination": LONGEST, "decode_s": rng.random()}
        found += [broker_pb2.LinkUse(role=role, codec=codec, **f) for f in (out, back)]
    return found


def test_a_report_of_a_holder_with_a_thousand_links_has_the_heaviest(running: Make) -> None:
    one = running()
    assert one.assignment is not None
    assert one.assignment.steps is not None
    every = uses(1000)
    assert sum(use.ByteSize() for use in every) > 4 * MOST_MESSAGE_BYTES
    update = next(a for a in one.assignment.steps.program.actions if str(a).startswith("U"))
    real = one.handle

    def handle(event: e.Event, now: float) -> list[e.Instruction]:
        if isinstance(event, e.Computed) and event.action == update:
            result = e.Result(0.1, links=tuple(every))
            event = e.Computed(event.run, event.term, event.step, event.action, result)
        return real(event, now)

    one.handle = handle  # type: ignore[method-assign]
    out = finish_step(one)
    (report,) = told(out, "step")
    (message,) = (i.message for i in out if isinstance(i, e.Tell) and i.message.HasField("step"))
    assert 0.8 * MOST_MESSAGE_BYTES < message.ByteSize() <= MOST_MESSAGE_BYTES
    least = min(use.bytes for use in report.links)
    assert {u.destination for u in report.links} == {
        u.destination for u in every if u.bytes >= least
    }
    assert all(use in every for use in report.links)


@given(st.integers(0, 40), st.integers(0, 9000), st.randoms(use_true_random=False))
def test_the_heaviest_that_fit_come_in_their_order(n: int, room: int, rng: random.Random) -> None:
    every = uses(n, rng.randrange(100))
    kept = heaviest(every, room)
    assert broker_pb2.StepReport(links=kept).ByteSize() <= room
    at = [every.index(use) for use in kept]
    assert at == sorted(at)
    by_weight = sorted(every, key=lambda use: (-use.bytes, -use.decode_s))
    assert sorted(at) == sorted(every.index(use) for use in by_weight[: len(kept)])
    assert heaviest(every, 10**9) == tuple(every)


def test_nothing_fits_where_there_is_no_room() -> None:
    assert fitting(uses(3), -1) == 0
    assert heaviest(uses(3), -1) == ()


def keeper(count: int) -> tuple[PeerMachine, list[broker_pb2.Snapshot]]:
    found = [
        broker_pb2.Snapshot(run="r-1234", term=3, step=i, holder=LONGEST, spans=[{"stop": 9}])
        for i in range(count)
    ]
    profile = broker_pb2.Profile(name="me", data=[{"name": LONGEST, "users": [LONGEST] * 50}])
    return PeerMachine(PeerId("me"), "b", profile, snapshots=[(s, 1) for s in found]), found


def attach(one: PeerMachine) -> tuple[broker_pb2.PeerMessage, list[broker_pb2.SnapshotReport]]:
    one.handle(e.Started(), 0.0)
    (hello,) = (i.message for i in one.handle(e.Attached(), 0.0) if isinstance(i, e.Tell))
    return hello, told(one.handle(WELCOME, 0.0), "snapshot")


def test_who_keeps_very_many_snapshots_tells_the_rest_after_the_welcome() -> None:
    one, found = keeper(1500)
    hello, reports = attach(one)
    assert 0.8 * MOST_MESSAGE_BYTES < hello.ByteSize() <= MOST_MESSAGE_BYTES
    assert hello.hello.snapshots[-1].step == 1499, "the newest"
    said = [*hello.hello.snapshots, *(r.snapshot for r in reports)]
    assert sorted(SnapshotId.of(s) for s in said) == sorted(SnapshotId.of(s) for s in found)
    assert all(r.held for r in reports)


def test_few_snapshots_are_in_the_hello() -> None:
    one, found = keeper(40)
    hello, reports = attach(one)
    assert list(hello.hello.snapshots) == found
    assert not reports


def test_no_more_is_told_than_may_wait_or_is_remembered() -> None:
    assert min(MOST_SNAPSHOTS, _WAITING) > _SNAPSHOTS_TOLD
    one, _ = keeper(5000)
    hello, reports = attach(one)
    assert len(hello.hello.snapshots) + len(reports) == _SNAPSHOTS_TOLD


def test_the_words_of_an_error_are_bounded() -> None:
    for error in (ValueError("é" * 10**6), RuntimeError("x" * 10**6)):
        assert 1000 < len(said_of(error).encode()) < MOST_MESSAGE_BYTES / 8
