"""The simulated world: whole runs by the broker's and the peers' own machines."""

from __future__ import annotations

import gc
import json
from itertools import pairwise

import pytest

from shoal.job import Job
from shoal.net.transports.memory import SILENT_S, steady
from shoal.peer.core import events as p
from shoal.peer.core.events import StopAsked
from shoal.peer.core.options import PeerOptions
from shoal.proto import broker_pb2
from shoal.sim.trace import COMPUTE, Trace
from shoal.sim.virtual.clock import StalledError, VirtualClock
from shoal.sim.virtual.world import BROKER, PeerSpec

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


def test_the_collector_is_as_it_was_when_time_stands_still():
    before, clock, during = gc.get_threshold(), VirtualClock(), []
    clock.after(1.0, lambda: during.append(gc.get_threshold()))
    clock.until(lambda: bool(during))
    assert gc.get_threshold() == before != during[0]
    with pytest.raises(StalledError):
        clock.until(lambda: False)
    assert gc.get_threshold() == before


def reasons(world, run) -> str:
    """Why the run was in its phases, one line for each."""
    return "\n".join(e.state.reason.text for e in world.events(run) if e.HasField("state"))


def test_a_run_that_loses_a_peer_goes_on_with_the_others_to_the_same_weights(gpt, equal_training):
    world = gpt.world(3)
    run = world.submit(gpt.spec)
    trained_a_step(world, run)
    world.kill("p1")
    equal_training(gpt.finish(world, run), gpt.plain())
    assert "peer p1 was lost at step 1: its stream ended" in reasons(world, run)
    assert world.broker.machine.replica(run).record.term == 2
    world.until(lambda: len(world.broker.machine.members.pool) == 2)


def test_a_peer_that_dies_before_it_is_noticed_by_a_closed_stream_is_lost_by_its_lease(
    gpt, equal_training
):
    world = gpt.world(3)
    run = world.submit(gpt.spec)
    trained_a_step(world, run)
    world.peers["p2"].alive = False  # half-open: nothing is closed, nothing is said any more
    equal_training(gpt.finish(world, run), gpt.plain())
    assert "peer p2 was lost at step 1: it was silent" in reasons(world, run)


def test_the_pool_takes_the_next_run_when_one_has_ended(gpt, equal_training):
    world = gpt.world(2)
    first = gpt.train(world)
    equal_training(gpt.train(world), first)


def test_a_peer_with_too_little_memory_is_left_in_the_pool_with_the_reason(gpt):
    peers = [PeerSpec(name="big"), PeerSpec(name="tiny", memory_bytes=1000)]
    world = gpt.world(peers)
    events = world.finish(world.submit(gpt.spec))
    report = next(e.report for e in events if e.HasField("plan"))
    assert [s.peer for s in report.spares] == ["tiny"]
    assert "memory" in report.spares[0].reason
    assert events[-1].state.phase == broker_pb2.DONE


def test_a_run_that_nobody_has_the_memory_for_says_how_much_until_somebody_joins(gpt):
    world = gpt.world([PeerSpec(name="tiny", memory_bytes=1000)])
    run = world.submit(gpt.spec)
    world.until(lambda: world.broker.machine.replica(run).record.reason.code == "memory")
    assert "short by" in world.broker.machine.replica(run).record.reason.text
    world.join(PeerSpec(name="big"))
    assert world.finish(run)[-1].state.phase == broker_pb2.DONE


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
    (events,) = world.broker.published.values()
    assert sum(e.step.again_bytes for e in events) > 0


def test_a_peer_stopped_by_its_owner_leaves_when_its_part_is_handed_over(gpt, equal_training):
    world = gpt.world(2, peer_options=PeerOptions())
    run = world.submit(gpt.spec)
    trained_a_step(world, run)
    world.peers["p1"].handle(StopAsked())
    equal_training(gpt.finish(world, run), gpt.plain())
    world.until(lambda: world.peers["p1"].exit is not None)
    assert world.peers["p1"].exit is not None
    assert world.peers["p1"].exit.code == 0


def test_a_peer_whose_stream_to_the_broker_broke_takes_part_in_the_next_run(gpt, equal_training):
    world = gpt.world(3)
    run = world.submit(gpt.spec)
    trained_a_step(world, run)
    world.cut("p1")
    equal_training(gpt.finish(world, run), gpt.plain())
    equal_training(gpt.train(world), gpt.plain())
    assert len(world.broker.machine.members.members) == 3


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


# ------------------------------------------------------------ faults


def trained_a_step(world, run):
    world.until(lambda: any(e.HasField("step") for e in world.events(run)))


def test_a_way_that_is_parted_for_a_while_delays_the_run_and_loses_nothing(gpt, equal_training):
    calm, world = gpt.world(3), gpt.world(3)
    wanted = gpt.train(calm)
    at = calm.now - 0.2
    world.after(at, lambda: world.part("p0", "p1"))
    world.after(at + SILENT_S / 2, lambda: world.mend("p0", "p1"))
    equal_training(gpt.train(world), wanted)
    assert calm.now + 0.9 * SILENT_S / 2 < world.now < calm.now + SILENT_S


def test_half_open_streams_break_and_come_again_once_it_is_mended(gpt):
    world = gpt.world(2)
    run = world.submit(gpt.spec)
    trained_a_step(world, run)
    world.part("p0", "p1")
    began, downs = world.now, []
    world.observe = lambda seen: downs.append(seen) if isinstance(seen.record, p.LinkDown) else None
    world.until(lambda: len(downs) >= 2)
    assert {seen.who for seen in downs} == {"p0", "p1"}, "both ends notice"
    assert world.now - began == pytest.approx(SILENT_S)
    assert "no answer" in downs[0].record.why
    ups = []
    world.observe = lambda seen: ups.append(seen) if isinstance(seen.record, p.LinkUp) else None
    world.mend("p0", "p1")
    world.until(lambda: len(ups) >= 2 or run in world.broker.ended)
    assert world.finish(run)[-1].state.phase in (broker_pb2.DONE, broker_pb2.FAILED)


def test_a_peer_that_the_broker_cannot_hear_is_lost_by_its_lease(gpt, equal_training):
    world = gpt.world(2)
    run = world.submit(gpt.spec)
    trained_a_step(world, run)
    world.stretch("p0", 1e6)  # else the run is over before
    world.part("p1", BROKER)
    world.until(lambda: "p1 was lost" in reasons(world, run))
    world.stretch("p0", 1.0)
    equal_training(gpt.finish(world, run), gpt.plain())
    assert "peer p1 was lost at step 1: it was silent" in reasons(world, run)


def test_a_process_that_stands_still_goes_on_where_it_was(gpt, equal_training):
    calm, world = gpt.world(3), gpt.world(3)
    wanted = gpt.train(calm)
    at, pause = calm.now - 0.2, 3.0
    began = []
    world.observe = lambda seen: began.append(seen) if seen.who == "p1" else None
    world.after(at, lambda: world.stop("p1"))
    world.after(at + pause, lambda: world.go_on("p1"))
    equal_training(gpt.train(world), wanted)
    assert not [seen for seen in began if at < seen.now < at + pause]
    assert world.now == pytest.approx(calm.now + pause, abs=0.3)


def test_a_slow_link_and_a_slow_peer_cost_time_only(gpt, equal_training):
    calm, slow, slower = (gpt.world(2, carry=steady(0.005, 1e5)) for _ in range(3))
    wanted = gpt.train(calm)
    slow.slow("p0", "p1", 10)
    equal_training(gpt.train(slow), wanted)
    assert slow.now > calm.now + 1
    slower.stretch("p1", 1e4)
    equal_training(gpt.train(slower), wanted)
    assert slower.now > calm.now + 1


def test_a_changed_byte_is_noticed_and_what_it_was_in_comes_again(gpt, equal_training):
    world = gpt.world(2)
    world.until(lambda: len(world.broker.machine.members.pool) == 2)
    wanted = gpt.train(gpt.world(2))

    def corrupt(seen):
        if isinstance(seen.record, p.SendFrame) and len(refused) < 3:
            world.corrupt(seen.who, seen.record.key.destination)
            refused.append(seen)

    refused = []
    world.observe = corrupt
    equal_training(gpt.train(world), wanted)
    assert sum("refused link" in line for line in world.log) >= 1
    assert "checksum" in "\n".join(world.log)


def test_a_peer_that_died_comes_again_as_another_process_and_takes_part(gpt, equal_training):
    world = gpt.world(2)
    world.until(lambda: len(world.broker.machine.members.pool) == 2)
    with pytest.raises(ValueError, match="here already"):
        world.join(PeerSpec(name="p1"))
    world.kill("p1")
    world.join(PeerSpec(name="p1"))
    world.join(PeerSpec(name="p2"))
    trained = gpt.train(world)
    equal_training(trained, gpt.plain())
    world.until(lambda: len(world.broker.machine.members.pool) == 3)
    assert {"p1", "p2"} <= {line.split()[1] for line in world.log if "computes" in line}


def test_peers_come_and_leave_when_their_owners_say(gpt):
    peers = [PeerSpec(name="a"), PeerSpec(name="b", joins_s=30.0, stays_s=60.0)]
    world = gpt.world(peers)
    members = world.broker.machine.members.members
    world.until(lambda: "b" in members)
    assert 30.0 < world.now < 31.0
    world.until(lambda: "b" not in members)
    assert 90.0 < world.now < 91.0
    assert world.peers["b"].exit.code == 0
    world.until(lambda: not world.peers["b"].alive)
    assert "a" in members


# ------------------------------------------------------------ observer and trace


def test_the_observer_sees_what_is_about_to_be_done_and_may_prevent_it(gpt, equal_training):
    world = gpt.world(3)

    def watch(seen):
        if isinstance(seen.record, p.Compute) and (seen.who, seen.record.step) == ("p1", 2):
            world.kill("p1")

    world.observe = watch
    equal_training(gpt.train(world), gpt.plain())
    computed = [line for line in world.log if " p1 computes" in line]
    assert computed
    assert not any("of step 2" in line for line in computed)


def test_the_trace_has_every_action_and_frame(gpt):
    trace = Trace()
    world = gpt.world(3, trace=trace)
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(gpt.spec)
    job = json.loads(spec.job)
    job["train"]["eval_every"] = 0  # frames of an evaluation are no step's
    spec.job = json.dumps(job)
    run = world.submit(spec)
    steps = [e.step for e in world.finish(run) if e.HasField("step")]
    stages, microbatches = 3, 4
    by_kind = {
        kind: [s for s in trace.spans if s.kind == kind] for kind in (*COMPUTE, "build", "send")
    }
    for kind in ("forward", "backward"):
        assert len(by_kind[kind]) == len(steps) * stages * microbatches
        assert {(s.step, s.stage, s.microbatch) for s in by_kind[kind]} == {
            (i, k, m) for i in range(len(steps)) for k in range(stages) for m in range(microbatches)
        }
    assert len(by_kind["update"]) == len(steps) * stages
    assert len(by_kind["build"]) == stages
    frames = [s for s in by_kind["send"] if s.role not in ("probe", "snapshot")]  # no step's bytes
    assert sum(s.size_bytes for s in frames) == sum(s.sent_bytes for s in steps)
    assert all(s.dense_bytes == s.size_bytes for s in frames if s.role == "activation")
    for peer in world.peers:
        mine = sorted(
            (s.start_s, s.end_s) for s in trace.spans if s.peer == peer and s.kind in COMPUTE
        )
        assert all(a[1] <= b[0] for a, b in pairwise(mine)), "one at a time"
    losses = [float(m.text) for m in trace.marks if m.what == "loss"]
    assert losses == [s.outcome.loss for s in steps]
    assert [m.who for m in trace.marks if m.what == "join"] == ["p0", "p1", "p2"]
