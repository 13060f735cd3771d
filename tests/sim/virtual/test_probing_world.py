"""Links measured in the simulated world: by probes before a run and by its frames during it."""

from __future__ import annotations

import random

import pytest

from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.sim.virtual.world import PeerSpec, World

JOB = Job.from_table(
    {
        "version": 1,
        "name": "gpt-probed",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 2, "width": 16, "heads": 2, "length": 16, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 16},
        "train": {"steps": 3, "batch": 8, "microbatch": 2, "lr": 1e-2},
    }
)


@pytest.fixture
def gpt(laboratory):
    return laboratory(JOB)


class Links:
    """Each directed pair its own latency and rate, as a `carry`; `slower` divides all rates."""

    def __init__(self, peers, seed=0, rates=(1e5, 1e8)):
        rng = random.Random(seed)
        self.slower = 1.0
        self.true = {}
        low, high = rates
        for i, a in enumerate(peers):
            for b in peers[i + 1 :]:
                latency = rng.uniform(0.002, 0.12)
                for pair in ((a, b), (b, a)):
                    self.true[pair] = latency, low * (high / low) ** rng.random()

    def __call__(self, source, destination, size_bytes):
        latency, rate = self.true[source, destination]
        busy = size_bytes * self.slower / rate
        return busy, busy + latency


def world_of(count, folder, seed=0, **options):
    names = [f"p{i}" for i in range(count)]
    links = Links(names, seed)
    peers = [PeerSpec(name=name) for name in names]
    world = World(peers, blobs={}, folder=folder, carry=links, **options)
    world.until(lambda: len(world.broker.machine.members.members) == count)
    return world, links


def quiet(world):
    """Lets the world go on until every probe has ended, here and there."""
    probing = world.broker.machine.probing
    world.until(lambda: probing.settled(world.peers))
    world.until(lambda: not any(len(peer.machine.probes) for peer in world.peers.values()), 30.0)


def estimate(world, a, b):
    return world.broker.machine.probing.links.get(a, b, world.now)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_measured_is_what_the_world_models(tmp_path, seed):
    world, links = world_of(5, tmp_path, seed)
    quiet(world)
    for (a, b), (latency, rate) in links.true.items():
        found = estimate(world, a, b)
        assert found.latency_s == pytest.approx(latency, rel=0.05)
        if 2 * latency * rate < 8 << 20:
            assert found.bytes_per_s == pytest.approx(rate, rel=0.05)
        else:  # it takes more bytes to fill than a probe has
            assert 0.6 * rate < found.bytes_per_s < 1.05 * rate


def test_a_large_pool_settles_in_linearly_many_probes(tmp_path):
    world, links = world_of(20, tmp_path)
    probing = world.broker.machine.probing
    world.until(lambda: probing.settled(world.peers))
    network = probing.network(list(world.peers), world.now)
    measured = int(network.measured.sum()) - 20
    assert 2 * 3 * 20 / 2 <= measured <= 2 * 4 * 20
    assert len(links.true) == 380


def test_the_same_world_measures_the_same_byte_for_byte(tmp_path):
    logs = []
    for _ in range(2):
        world, _ = world_of(4, tmp_path)
        world.until(lambda w=world: w.broker.machine.probing.settled(w.peers))
        logs.append(world.log)
    assert logs[0] == logs[1]


def test_a_peer_lost_in_mid_probe_harms_nobody(tmp_path):
    world, links = world_of(3, tmp_path)
    probing = world.broker.machine.probing
    world.until(lambda: len(probing._busy) == 2)
    lost, other = probing._busy
    world.kill(lost)
    rest = [name for name in world.peers if name != lost]
    world.until(lambda: lost not in world.broker.machine.members.members)
    world.until(lambda: probing.settled(rest))
    assert estimate(world, *rest).bytes_per_s == pytest.approx(links.true[tuple(rest)][1], rel=0.05)
    assert other in world.broker.machine.members.members


def test_parted_peers_report_that_there_is_no_route(tmp_path):
    world, _ = world_of(2, tmp_path)
    world.network.part("p0", "p1")
    probing = world.broker.machine.probing
    world.until(lambda: probing.settled(world.peers), 60.0)
    assert estimate(world, "p0", "p1") is None
    assert any("link_unmeasured" in line for line in world.log)
    assert len(world.broker.machine.members.pool) == 2


def by_hand(gpt, peers):
    """One stage on each peer, so that the run uses every link whatever it carries."""
    operators, n = len(gpt.graph.operators), len(peers)
    cuts = [operators * i // n for i in range(n + 1)]
    stages = tuple(
        StageSlot(a, b, (PeerId(p),)) for a, b, p in zip(cuts, cuts[1:], peers, strict=False)
    )
    route = tuple(Visit(k, PeerId(p)) for k, p in enumerate(peers))
    train = gpt.job.train
    return Plan(stages, (route,) * train.microbatches, train.microbatch_size)


def test_an_assignment_in_mid_probe_ends_it_and_the_run_is_exact(gpt, equal_training):
    links = Links(["p0", "p1", "p2"], rates=(2e4, 4e4))
    world = gpt.world(3, carry=links)
    trained = gpt.train(world, by_hand(gpt, list(world.peers)))
    assigned = next(i for i, line in enumerate(world.log) if "to p0: assign" in line)
    assert any(": probe" in line for line in world.log[:assigned])
    assert any("link_unmeasured" in line for line in world.log[assigned:])
    equal_training(trained, gpt.plain())


@pytest.mark.parametrize("at", [0.05, 0.09, 0.2, 0.35, 0.6, 1.7])
def test_an_assignment_at_any_moment_of_the_probes_trains_to_its_end(gpt, at):
    """One end may hear of it long before the other."""
    links = Links(["p0", "p1", "p2"], seed=5, rates=(1e5, 1e6))
    world = gpt.world(3, carry=links)
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(gpt.spec)
    spec.plan.CopyFrom(plan_to_proto(by_hand(gpt, list(world.peers))))
    done = []
    world.after(at, lambda: done.append(True))
    world.until(lambda: bool(done))
    assert world.finish(world.submit(spec))[-1].state.phase == broker_pb2.DONE
    quiet(world)


def test_a_run_waits_for_the_links_of_its_peers_and_no_longer(gpt):
    world = gpt.world(2)
    events = world.finish(world.submit(gpt.spec))
    waits = [e.state.reason.code for e in events if e.HasField("state") and e.state.reason.code]
    assert waits[:2] == ["probing", "planning"]
    began = next(e.at_s for e in events if e.state.reason.code == "planning")
    assert began < world.broker.machine.probing.options.probe_s / 2, "settled, not out of patience"


def test_frames_of_a_run_move_the_estimates_when_a_link_changes(gpt):
    """Its frames are small, so they tell the latency; the slow link makes a window of each step."""
    links = Links(["p0", "p1"])
    links.true = dict.fromkeys(links.true, (0.5, 1e7))
    world = gpt.world(2, carry=links)
    world.until(lambda: len(world.broker.machine.members.members) == 2)
    quiet(world)
    assert estimate(world, "p0", "p1").latency_s == pytest.approx(0.5, rel=0.05)
    before = estimate(world, "p0", "p1").bytes_per_s
    assert before == pytest.approx(1e7, rel=0.1), "it holds a third of a probe's bytes"
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(gpt.spec)
    spec.plan.CopyFrom(plan_to_proto(by_hand(gpt, list(world.peers))))
    links.true = dict.fromkeys(links.true, (2.0, 1e7))
    world.finish(world.submit(spec))
    found = estimate(world, "p0", "p1")
    assert found.origin == "traffic"
    assert 0.6 < found.latency_s <= 2.0
    assert found.bytes_per_s == pytest.approx(before, rel=1e-6), "small frames do not tell it"
