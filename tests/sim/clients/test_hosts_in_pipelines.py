"""Clients whose data stays with hosts that have too little memory for the model, in the simulated
world: a host and peers without data are a pipeline, and the host has the stages at both ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.dag.plan.action import Kind
from shoal.dag.schedule.flow import Role
from shoal.job import Job
from shoal.job.clients.local_work import LocalWork
from shoal.peer.core.events import Compute
from shoal.peer.data.manifest import Manifest
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.peer_shell import PeerShell
from shoal.sim.virtual.world import PeerSpec

from .test_federated_world import job_of
from .test_hosts_world import Hosts

pytestmark = pytest.mark.usefixtures("plans_once")

MODEL = """
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        )

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)

def deep():
    return Classifier()
"""
SMALL = 8000
"""Bytes of a peer that has no room for the model."""


def lent(number: int, memory_bytes: int = SMALL) -> PeerSpec:
    return PeerSpec(name=f"lent{number}", place="c", memory_bytes=memory_bytes)


@pytest.fixture
def hosts(laboratory: Callable[[Job], Any], tmp_path: Path) -> Hosts:
    """Three hosts, of which the last two are small, and four small peers without data."""
    job = job_of(tmp_path, "fedavgm", 2)
    (tmp_path / "deep.py").write_text(MODEL)
    model = replace(job.model, factory=str(tmp_path / "deep.py") + ":deep")
    train = replace(job.train, microbatch=1, clip=0.3)
    sync = replace(job.sync, local=LocalWork(passes=1))
    job = replace(job, name="hosts in pipelines", model=model, train=train, sync=sync)
    found = Hosts.of(laboratory(job), tmp_path)
    found.job = replace(found.job, sync=replace(found.job.sync, per_round=3))
    found.spec.job = found.job.to_json()
    small = [replace(p, memory_bytes=SMALL) for p in found.peers[2:]]
    found.peers = [found.peers[1], *small, *map(lent, range(4))]
    return found


def holders(world: Any, run: str) -> list[list[str]]:
    """Return by replica who holds its stages, as at the end of the run."""
    replicas = world.broker.machine.decided.runs[run].replicas
    return [[s.holders[0] for s in r.plan.stages] for r in replicas if r.plan]


def test_hosts_with_helpers_and_one_without_are_a_plain_loop_and_no_sample_leaves_its_host(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, bytes]] = []
    arrived = PeerShell._arrived

    def hears(self: PeerShell, frame: Any) -> None:
        if frame.key.role is not Role.PROBE:
            heard.append((self.name, bytes(frame.data)))
        arrived(self, frame)

    monkeypatch.setattr(PeerShell, "_arrived", hears)
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.finish(run)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [3] * 2
    by_host = {line[0]: line for line in holders(world, run)}
    assert by_host.keys() == {"h0", "h1", "h2"}
    assert by_host["h0"] == ["h0"], "it has the memory"
    for name in ("h1", "h2"):
        first, *between, last = by_host[name]
        assert first == last == name
        assert between
        assert all(p.startswith("lent") for p in between)
    for i, ref in enumerate(hosts.spec.client_data):
        shards = {s.hash for s in Manifest.from_json(world.blobs[ref.hash]).shards}
        read = {name for name, peer in world.peers.items() if shards & peer.work.fetched}
        assert read == {f"h{i}"}
    rows = [row.tobytes() for arrays in hosts.arrays for row in arrays["x"]]
    labels = {row.tobytes() for arrays in hosts.arrays for row in arrays["y"]}
    others = [data for name, data in heard if name.startswith("lent")]
    assert len(others) > 100
    together = b"|".join(others)
    assert not any(row in together for row in rows)
    assert labels.isdisjoint(others)


@pytest.mark.parametrize(
    "moments", [(5,), pytest.param((1, 3, 8, 10, 13, 15), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("lost", ["lent", "h1"])
def test_whoever_is_lost_each_client_counts_once_or_not_at_all(
    hosts: Hosts, lost: str, moments: tuple[int, ...]
) -> None:
    hosts.peers.append(lent(4))

    def play(deadly: int) -> list[int]:
        world, updates, gone = hosts.world(), 0, list[str]()
        run, checks = world.submit(hosts.spec), world.observe

        def observe(seen: Observed) -> None:
            nonlocal updates
            checks(seen)
            record = seen.record
            mine = isinstance(record, Compute) and record.action.kind is Kind.UPDATE
            updates += mine and seen.who == "h1"
            if mine and updates >= deadly and not gone and seen.who.startswith(lost):
                gone.append(seen.who)
                world.kill(seen.who)

        world.observe = observe
        world.finish(run)
        assert gone, "nobody was lost"
        assert all("h1" not in line or line[0] == "h1" for line in holders(world, run))
        return [len(d.members) for d in hosts.assert_expected(world, run)]

    counts = [n for deadly in moments for n in play(deadly)]
    assert lost == "lent" or min(counts) < 3


@pytest.mark.slow
def test_where_helpers_are_too_few_it_is_said_what_to_do(hosts: Hosts) -> None:
    hosts.peers = hosts.peers[:5]
    world = hosts.world()
    run = world.submit(hosts.spec)

    def said() -> bool:
        reasons = [e.state.reason.text for e in world.events(run) if e.HasField("state")]
        return any(
            "cannot train the client whose data it has" in r
            and "Let more peers without data join" in r
            for r in reasons
        )

    world.until(said, 30.0)
    for i in (2, 3):
        world.join(lent(i))
    world.finish(run)
    hosts.assert_expected(world, run)
