"""The simulated world: whole runs by the broker's and the peers' own machines."""

from __future__ import annotations

import pytest

from shoal.job import Job
from shoal.net.memory import steady
from shoal.peer.events import StopAsked
from shoal.peer.machine import PeerOptions
from shoal.proto import broker_pb2
from shoal.sim.world import PeerSpec

JOB = Job.from_table(
    {
        "version": 1,
        "name": "gpt",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 2, "width": 16, "heads": 2, "length": 16, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 16},
        "train": {"steps": 4, "batch": 8, "microbatch": 2, "lr": 1e-2},
    }
)


@pytest.fixture
def gpt(laboratory):
    return laboratory(JOB)


def test_a_run_equals_the_plain_loop(gpt, equal_training):
    equal_training(gpt.train(gpt.world(3)), gpt.plain())


def test_one_peer_is_enough(gpt, equal_training):
    equal_training(gpt.train(gpt.world(1)), gpt.plain())


def test_the_same_world_gives_the_same_events_byte_for_byte(gpt):
    first, second = gpt.train(gpt.world(3)), gpt.train(gpt.world(3))
    assert first.log == second.log
    assert first.losses == second.losses


def test_slower_links_change_the_time_and_nothing_else(gpt):
    near, far = gpt.world(3), gpt.world(3, carry=steady(0.2, 1e5))
    first, second = gpt.train(near), gpt.train(far)
    assert first.losses == second.losses
    assert far.now > 3 * near.now


def test_a_lost_peer_ends_the_run_with_its_name_and_frees_the_others(gpt):
    world = gpt.world(3)
    run = world.submit(gpt.spec)
    world.until(lambda: any(e.HasField("step") for e in world.events(run)))
    world.kill("p1")
    last = world.finish(run)[-1].state
    assert last.phase == broker_pb2.FAILED
    assert "p1" in last.reason.text
    assert 1 <= last.step < 4
    world.until(lambda: len(world.broker.machine.members.pool) == 2)


def test_a_peer_that_dies_before_it_is_noticed_by_a_closed_stream_is_lost_by_its_lease(gpt):
    world = gpt.world(3)
    run = world.submit(gpt.spec)
    world.until(lambda: any(e.HasField("step") for e in world.events(run)))
    world.peers["p2"].alive = False  # half-open: nothing is closed, nothing is said any more
    last = world.finish(run)[-1].state
    assert last.phase == broker_pb2.FAILED
    assert "p2" in last.reason.text


def test_the_pool_takes_the_next_run_when_one_has_ended(gpt, equal_training):
    world = gpt.world(2)
    first = gpt.train(world)
    equal_training(gpt.train(world), first)


def test_a_peer_with_too_little_memory_is_left_in_the_pool_with_the_reason(gpt):
    peers = [PeerSpec(name="big"), PeerSpec(name="tiny", memory_bytes=1000)]
    world = gpt.world(peers)
    events = world.finish(world.submit(gpt.spec))
    plan = next(e.plan for e in events if e.HasField("plan"))
    assert [s.peer for s in plan.spares] == ["tiny"]
    assert "memory" in plan.spares[0].reason
    assert events[-1].state.phase == broker_pb2.DONE


def test_nobody_with_enough_memory_ends_the_run_and_says_how_much_is_short(gpt):
    world = gpt.world([PeerSpec(name="tiny", memory_bytes=1000)])
    last = world.finish(world.submit(gpt.spec))[-1].state
    assert last.phase == broker_pb2.FAILED
    assert "memory" in last.reason.text
    assert "short by" in last.reason.text


def test_a_broken_link_is_dialled_again_and_loses_nothing(gpt, equal_training):
    world = gpt.world(3, carry=steady(0.005, 1e5))
    broken = []

    def cut() -> None:
        for a, b in (("p0", "p1"), ("p1", "p2"), ("p0", "p2")):
            broken.append(world.network.break_link(a, b))
        world.after(1.0, cut)

    world.until(lambda: len(world.broker.machine.members.members) == 3)
    world.after(0.15, cut)
    equal_training(gpt.train(world), gpt.plain())
    assert sum(broken) >= 3


def test_a_peer_stopped_by_its_owner_leaves_after_its_step(gpt):
    world = gpt.world(2, peer_options=PeerOptions())
    run = world.submit(gpt.spec)
    world.until(lambda: any(e.HasField("step") for e in world.events(run)))
    world.peers["p1"].handle(StopAsked())
    last = world.finish(run)[-1].state
    assert last.phase == broker_pb2.FAILED
    assert "p1" in last.reason.text
    assert world.peers["p1"].exit is not None
    assert world.peers["p1"].exit.code == 0


def test_a_peer_whose_stream_to_the_broker_broke_takes_part_in_the_next_run(gpt, equal_training):
    world = gpt.world(3)
    run = world.submit(gpt.spec)
    world.until(lambda: any(e.HasField("step") for e in world.events(run)))
    world.cut("p1")
    assert world.finish(run)[-1].state.phase == broker_pb2.FAILED
    equal_training(gpt.train(world), gpt.plain())


def test_a_stranger_that_claims_to_be_a_neighbour_takes_no_link_down(gpt):
    world = gpt.world(2, carry=steady(0.05, 2e3))
    run = world.submit(gpt.spec)
    world.until(lambda: any(e.HasField("step") for e in world.events(run)))
    stranger = world.network.transport("p1", "other", lambda _: None, address="elsewhere")
    stranger.dial("p0", "p0", 1)
    world.after(5.0, stranger.close)
    began = world.now
    assert world.finish(run)[-1].state.phase == broker_pb2.DONE
    assert world.now > began + 30
    assert any("refused link of p1" in line for line in world.log)
