"""Sums with masks of clients whose data stays with their hosts, and of clients that train on
virtual data, in the simulated world: against plain loops, and to the bit against the same without
masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shoal.broker.events import Persist
from shoal.broker.policies import segments
from shoal.job import Job
from shoal.job.clients.client_privacy import ClientPrivacy
from shoal.peer.core.events import BeginRound
from shoal.proto.broker_pb2 import DONE
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.conftest import Laboratory
from shoal.tests.sim.rounds.test_secure_world import PHASES, hashes

from . import test_vhl_world as vhl
from .test_federated_world import exported, job_of, world_of
from .test_hosts_world import Hosts

SAMPLES = 24, 41, 32, 28
SHARES = ClientPrivacy(clip=0.4, epsilon=8.0, delta=1e-5, noise=0.2, where="distributed")


@pytest.fixture(autouse=True)
def several_adders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vectors are divided among all who may add up."""
    monkeypatch.setattr(segments, "UNDIVIDED", 10)


@pytest.fixture(scope="module")
def captured(laboratory: Callable[[Job], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return laboratory(job_of(tmp_path_factory.mktemp("masked"), "fedavgm", 3))


def hosts_of(captured: Any, folder: Path, **sync: Any) -> Hosts:
    """Four hosts with data, all of whom are asked in a round."""
    hosts = Hosts.of(captured, folder, SAMPLES)
    told = {"per_round": 4, "secure": True, **sync}
    hosts.job = replace(hosts.job, sync=replace(hosts.job.sync, **told))
    hosts.spec.job = hosts.job.to_json()
    return hosts


def played(hosts: Hosts, look: Callable[[Any, Any], None] | None = None) -> tuple[Any, str]:
    """Play a run. `look` sees the world and each record."""
    world = hosts.world()
    run, checks = world.submit(hosts.spec), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if look is not None:
            look(world, seen)

    world.observe = observe
    world.finish(run)
    return world, run


@pytest.mark.slow
def test_versions_of_hosts_are_those_without_masks_to_the_bit(
    captured: Any, tmp_path: Path
) -> None:
    hosts = hosts_of(captured, tmp_path)
    world, run = played(hosts)
    assert [len(d.members) for d in hosts.assert_expected(world, run)] == [4] * 3
    found = hashes(world, run)
    hosts.spec.job = replace(hosts.job, sync=replace(hosts.job.sync, secure=False)).to_json()
    assert hashes(*played(hosts)) == found


@pytest.mark.parametrize(
    "phase",
    [
        "it gives",
        *(
            pytest.param(p, marks=pytest.mark.slow)
            for p in ("it trains", "it dealt", "it holds", "it revealed")
        ),
    ],
)
def test_of_four_hosts_one_is_lost_in_any_phase(captured: Any, tmp_path: Path, phase: str) -> None:
    hosts = hosts_of(captured, tmp_path)

    def look(world: Any, seen: Any) -> None:
        if seen.who == "h1" and world.peers["h1"].alive and PHASES[phase](seen.record):
            world.kill("h1")

    world, run = played(hosts, look)
    assert not world.peers["h1"].alive
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [4 if phase == "it revealed" else 3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["it gives", "it revealed"])
def test_a_host_that_comes_back_is_in_the_sum_again(
    captured: Any, tmp_path: Path, phase: str
) -> None:
    hosts = hosts_of(captured, tmp_path)
    spec = next(p for p in hosts.peers if p.name == "h1")

    def look(world: Any, seen: Any) -> None:
        peer = world.peers["h1"]
        there = seen.who == "h1" and peer.alive and peer.incarnation == 0
        if there and PHASES[phase](seen.record):
            world.kill("h1")
            world.after(0.01, lambda: world.join(spec))
            world.stretch("h0", 1e5)  # so that others wait

    world, run = played(hosts, look)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done][2:] == [4]
    assert world.peers["h1"].incarnation == 1


@pytest.mark.slow
def test_another_peer_of_a_host_gives_its_part(captured: Any, tmp_path: Path) -> None:
    hosts = hosts_of(captured, tmp_path)
    hosts.peers.append(PeerSpec(name="h1-twin", place="s1", data=hosts.peers[2].data))

    def look(world: Any, seen: Any) -> None:
        if isinstance(seen.record, BeginRound) and world.peers["h1"].alive:
            world.kill("h1")

    world, run = played(hosts, look)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [3, 3, 4]


@pytest.mark.slow
def test_of_more_hosts_than_are_wanted_those_who_come_first_are_in_the_sum(
    captured: Any, tmp_path: Path
) -> None:
    hosts = hosts_of(captured, tmp_path, per_round=3, over_select=1.3)
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.until(lambda: any(e.HasField("round_begun") for e in world.events(run)))
    world.stretch("h1", 1e6)
    world.finish(run)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [3] * 3
    begun = [e.round_begun.work for e in world.events(run) if e.HasField("round_begun")]
    assert len(begun[0]) == 4


@pytest.mark.slow
def test_whenever_the_broker_is_started_again_hosts_come_to_the_same(
    captured: Any, tmp_path: Path
) -> None:
    hosts = hosts_of(captured, tmp_path)

    def play(deadly: int) -> tuple[Any, str, int]:
        written = 0

        def look(world: Any, seen: Any) -> None:
            nonlocal written
            written += isinstance(seen.record, Persist)
            if isinstance(seen.record, Persist) and written == deadly:
                world.restart_broker(1.0)

        return *played(hosts, look), written

    world, run, records = play(0)
    wanted = hashes(world, run)
    for deadly in range(3, records, 6):
        world, run, _ = play(deadly)
        assert hashes(world, run) == wanted


def test_each_host_adds_its_share_of_noise(captured: Any, tmp_path: Path) -> None:
    train = replace(captured.job.train, eval_every=0)
    hosts = Hosts.of(captured, tmp_path, SAMPLES)
    sync = replace(hosts.job.sync, per_round=4, secure=True, weight="equal", privacy=SHARES)
    data = replace(hosts.job.data, holdout=0.0)
    hosts.job = replace(hosts.job, sync=sync, data=data, train=train)
    hosts.spec.job = hosts.job.to_json()

    def look(world: Any, seen: Any) -> None:
        if seen.who == "h1" and world.peers["h1"].alive and PHASES["it gives"](seen.record):
            world.kill("h1")

    world, run = played(hosts, look)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [3, 3]
    assert [d.sums for d in done] == [2, 3]


# ------------------------------------------------------------ virtual data


@pytest.fixture(scope="module")
def base(
    laboratory: Callable[[Job], Laboratory], tmp_path_factory: pytest.TempPathFactory
) -> Laboratory:
    job = vhl.job_of(tmp_path_factory.mktemp("vhl"))
    return laboratory(replace(job, plan=replace(job.plan, replicas=3)))


@pytest.mark.parametrize(
    "method",
    ["fedprox", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fednova", "fedadam"))],
)
def test_clients_with_virtual_data_come_to_the_same_with_masks(
    base: Laboratory, method: str
) -> None:
    found = []
    for secure in (True, False):
        lab = vhl.by(base, method, secure=secure)
        world = world_of(lab, 3)
        run = world.submit(lab.spec)
        world.finish(run)
        assert [len(d.members) for d in vhl.assert_expected(lab, world, run)] == [3, 3, 3]
        found.append(hashes(world, run))
    assert found[0] == found[1], "to the bit"


@pytest.mark.slow
def test_whoever_is_lost_clients_with_virtual_data_are_left_out(base: Laboratory) -> None:
    plan = replace(base.job.plan, replicas=4)
    lab = vhl.by(base, secure=True)
    lab.job = replace(lab.job, plan=plan)
    lab.spec.job = lab.job.to_json()
    world = world_of(lab, 4)
    world.until(lambda: len(world.broker.machine.members.pool) == 4)
    run, checks = world.submit(lab.spec), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if seen.who == "p1" and world.peers["p1"].alive and PHASES["it gives"](seen.record):
            world.kill("p1")

    world.observe = observe
    world.finish(run)
    assert [len(d.members) for d in vhl.assert_expected(lab, world, run)] == [3, 3, 3]


@pytest.mark.slow
def test_hosts_with_virtual_data_come_to_a_plain_loop_with_masks(
    base: Laboratory, tmp_path: Path
) -> None:
    hosts = Hosts.of(vhl.by(base), tmp_path)
    hosts.job = replace(hosts.job, sync=replace(hosts.job.sync, per_round=3, secure=True))
    hosts.spec.job = hosts.job.to_json()
    world, run = played(hosts)
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    client_of = [r.client for e in events if e.HasField("formed") for r in e.formed.replicas]
    cohorts = hosts.cohorts(events, client_of)
    assert [len(c) for c in cohorts] == [3] * 3
    whole = {k: torch.tensor(np.concatenate([a[k] for a in hosts.arrays])) for k in "xy"}
    reader = SimpleNamespace(samples=lambda at: {k: t[at] for k, t in whole.items()})
    vhl.assert_close(exported(world, run), vhl.plain_of(base, cohorts, reader))
