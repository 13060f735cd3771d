"""Sums with masks of clients that send a part of their update, the same numbers all, in the
simulated world: against a plain loop that finds the numbers once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.broker.events import Persist
from shoal.broker.policies import segments
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain.client_loops import train_cohorts
from shoal.sim.plain.plain_cohorts import committed_cohorts, positions_of
from shoal.tests.sim.conftest import Laboratory
from shoal.tests.sim.rounds.test_secure_world import PHASES, hashes

from .test_federated_world import METHODS, exported, job_of, world_of
from .test_hosts_world import Hosts

NUMBERS = {"layers.0.weight": 48, "layers.0.bias": 8, "layers.2.weight": 24, "layers.2.bias": 3}
RATIO = 0.25
SENT = {name: max(1, round(RATIO * n)) for name, n in NUMBERS.items()}


@pytest.fixture(autouse=True)
def several_adders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vectors are divided among all who may add up."""
    monkeypatch.setattr(segments, "UNDIVIDED", 10)


@pytest.fixture(scope="module")
def base(
    laboratory: Callable[[Job], Laboratory], tmp_path_factory: pytest.TempPathFactory
) -> Laboratory:
    return laboratory(job_of(tmp_path_factory.mktemp("shared"), "fedavg"))


def sending(
    base: Laboratory, method: str = "fedavg", peers: int = 3, ratio: float = RATIO, **sync: Any
) -> Laboratory:
    """The same model and data, by another [sync]."""
    job = base.prepared.job
    options, _ = METHODS[method]
    keys = {"compression": "topk", "secure": True, **sync}
    if keys["compression"] == "topk":
        options_of = job.sync.compression_options
        keys["compression_options"] = replace(options_of, least_ratio=ratio, explore=0.4)
    job = replace(
        job,
        sync=replace(job.sync, method=method, options=options, **keys),
        plan=replace(job.plan, replicas=peers),
    )
    return Laboratory(job, replace(base.prepared, job=job), base.module)


def assert_expected(lab: Any, world: Any, run: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """It is done, and its weights are those of a plain loop over what it committed. Returns the
    rounds, and the version behind each."""
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    got, job, reader = exported(world, run), lab.job, lab.reader()
    versions = list[dict[str, Any]]()
    made = train_cohorts(
        lab.module,
        committed_cohorts(events, job, reader),
        lambda at: reader.samples(np.array(at)),
        METHODS[job.sync.chosen][1],
        lr=job.train.lr,
        momentum=job.train.momentum,
        positions=positions_of(job),
        committed=lambda _, result: versions.append(
            {n: t.clone() for n, t in result.shared.items()}
        ),
    )
    for name, tensor in made.shared.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)
    return [e.round_done for e in events if e.HasField("round_done")], versions


def played(
    lab: Any, peers: int = 3, look: Callable[[Any, Any], None] | None = None
) -> tuple[Any, str]:
    """Play a run. `look` sees the world and each record."""
    world = world_of(lab, peers)
    world.until(lambda: len(world.broker.machine.members.pool) == peers)
    run, checks = world.submit(lab.spec), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if look is not None:
            look(world, seen)

    world.observe = observe
    world.finish(run)
    return world, run


def test_clients_send_the_same_numbers_and_the_version_is_that_of_a_plain_loop(
    base: Laboratory,
) -> None:
    lab = sending(base)
    world, run = played(lab)
    done, versions = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [3] * 4
    both_ways = 2 * 2 * sum(SENT.values())
    assert [d.sent_bytes for d in done] == [8 * both_ways] * 4, "and no places beside the numbers"
    before = {n: p.detach() for n, p in lab.module.named_parameters()}
    places = []
    for version in versions:
        moved = {n: version[n] != before[n] for n in NUMBERS}
        assert {n: int(m.sum()) for n, m in moved.items()} == SENT
        places.append(torch.cat([moved[n].reshape(-1) for n in NUMBERS]))
        before = version
    for one, other in pairwise(places):
        common = int((one & other).sum())
        assert 0 < common < sum(SENT.values()), "some stay, and some are new"
    assert not any(w.kept for e in world.events(run) for w in e.round_begun.work)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedadam", "fedprox", "fedavgm"])
def test_a_method_makes_its_version_of_what_was_sent(base: Laboratory, method: str) -> None:
    lab = sending(base, method, peers=4, weight="equal")
    world, run = played(lab, 4)
    done, _ = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [4] * 4


@pytest.mark.slow
def test_where_all_is_sent_it_is_as_without_compression_to_the_bit(base: Laboratory) -> None:
    found = []
    for lab in (sending(base, ratio=1.0), sending(base, compression="none")):
        found.append(hashes(*played(lab)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "phase",
    ["it gives", *(pytest.param(p, marks=pytest.mark.slow) for p in ("it holds", "it revealed"))],
)
def test_whoever_is_lost_and_comes_back_finds_the_same_numbers(
    base: Laboratory, phase: str
) -> None:
    def look(world: Any, seen: Any) -> None:
        peer = world.peers["p1"]
        there = seen.who == "p1" and peer.alive and peer.incarnation == 0
        if there and PHASES[phase](seen.record):
            world.kill("p1")
            world.after(0.01, lambda: world.join(peer.spec))
            world.stretch("p0", 1e5)  # so that others wait

    lab = sending(base, peers=4)
    world, run = played(lab, 4, look)
    done, _ = assert_expected(lab, world, run)
    sizes = [len(d.members) for d in done]
    assert world.peers["p1"].incarnation == 1
    assert sizes[-1] == 4, "it took the version from others, and with it what this moved"


@pytest.mark.slow
@pytest.mark.parametrize("moment", [4, 7, 12])
def test_a_broker_that_is_started_again_changes_nothing(base: Laboratory, moment: int) -> None:
    written = 0

    def look(world: Any, seen: Any) -> None:
        nonlocal written
        written += isinstance(seen.record, Persist)
        if isinstance(seen.record, Persist) and written == moment:
            world.restart_broker(1.0)

    lab = sending(base)
    world, run = played(lab, look=look)
    assert written > moment
    assert_expected(lab, world, run)
    assert hashes(world, run) == hashes(*played(lab))


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_with_the_same_numbers(base: Laboratory) -> None:
    lab = sending(base, "fedadam")
    job = replace(lab.job, output=replace(lab.job.output, every=1))
    lab = Laboratory(job, replace(base.prepared, job=job), base.module)
    world, run = played(lab)
    whole = world.events(run)
    first = next(e.checkpoint for e in whole if e.HasField("checkpoint"))
    again = world_of(lab, 3)
    again.saved |= world.saved
    lab.spec.resumed.CopyFrom(first)
    more = again.submit(lab.spec)
    again.finish(more)
    assert hashes(again, more) == hashes(world, run)[first.step :], "to the bit"
    assert 0 < len(hashes(again, more)) < 4


@pytest.mark.slow
def test_hosts_send_the_same_numbers(base: Laboratory, tmp_path: Path) -> None:
    hosts = Hosts.of(base, tmp_path)
    sync = replace(sending(base).job.sync, per_round=3)
    hosts.job = replace(hosts.job, sync=sync)
    hosts.spec.job = hosts.job.to_json()
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.finish(run)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [3] * 4
