"""Clients whose data stays with their hosts, in the simulated world: whoever is lost, and whenever
the broker is started again, the weights are those of a plain loop over what rounds committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.broker.events import Publish, RunAsked, RunId
from shoal.broker.links.probing import Probing
from shoal.broker.policies import segments
from shoal.broker.records.run import RunRecord
from shoal.broker.round_rows import samples_of
from shoal.broker.rounds.exchange_planner import ExchangePlanner
from shoal.dag.cost.network import Network, uniform
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.cohorts import cohort_of, places_of
from shoal.job import Job
from shoal.job.clients.client_compression import CompressionOptions
from shoal.job.clients.local_work import LocalWork
from shoal.job.clients.partitioning import Partitioning
from shoal.peer.core.events import BeginRound
from shoal.peer.core.events import Tell as PeerTell
from shoal.peer.data.sources import resolve
from shoal.peer.federated.batches import Participant, batches
from shoal.proto import broker_pb2
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain.client_loops import ClientWork, train_cohorts
from shoal.sim.plain.plain_cohorts import (
    aggregate_of,
    local_training,
    method_of,
    positions_of,
)
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.clients.moments import broker_again, in_rounds

from .test_federated_world import MODEL, exported, job_of

SAMPLES = (24, 41, 32)


@dataclass
class Hosts:
    """Three hosts with data, one without, and a job for them."""

    lab: Any
    spec: broker_pb2.RunSpec
    peers: list[PeerSpec]
    arrays: list[dict[str, np.ndarray]]
    train: list[int]
    job: Job

    @classmethod
    def of(cls, lab: Any, folder: Path, samples: Sequence[int] = SAMPLES) -> Hosts:
        spec, arrays, peers, train = broker_pb2.RunSpec(), [], [PeerSpec(name="idle")], []
        spec.CopyFrom(lab.spec)
        spec.ClearField("client_sizes")
        data = replace(
            lab.job.data,
            where="peer",
            source="patients",
            partition=Partitioning(kind="by-peer", clients=len(samples)),
        )
        plan = replace(lab.job.plan, replicas="auto", scheduler="auto")
        sync = replace(lab.job.sync, per_round=2)
        job = replace(lab.job, data=data, plan=plan, sync=sync)
        for i, count in enumerate(samples):
            rng = np.random.default_rng(count)
            x = rng.normal(size=(count, 6)).astype(np.float32)
            arrays.append({"x": x, "y": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)})
            np.savez(folder / f"{i}.npz", **arrays[-1])
            made, shards = resolve(
                folder / str(i), kind="arrays", source=str(folder / f"{i}.npz"), holdout=0.25
            )
            ref = lab._blob(made.to_json().encode())
            for path in shards.values():
                lab._blob(path.read_bytes())
            spec.client_data.append(ref)
            spec.client_sizes.append(made.train)
            train.append(made.train)
            peers.append(PeerSpec(name=f"h{i}", place=f"s{i}", data={"patients": ref.hash}))
        spec.job, spec.local[:] = job.to_json(), ["x", "y"]
        spec.data.CopyFrom(spec.client_data[0])
        return cls(lab, spec, peers, arrays, train, job)

    def world(self) -> Any:
        world = self.lab.world(self.peers)
        Monitor(world)
        world.until(lambda: len(world.broker.machine.members.pool) == len(self.peers))
        return world

    def assert_expected(self, world: Any, run: str) -> list[Any]:
        """It is done, and its weights are those of a plain loop. Returns the rounds."""
        events = world.events(run)
        assert events[-1].state.phase == broker_pb2.DONE, events[-1].state.reason.text
        client_of = [r.client for e in events if e.HasField("formed") for r in e.formed.replicas]
        assert sorted(client_of) == list(range(len(self.train)))
        whole = {k: torch.tensor(np.concatenate([a[k] for a in self.arrays])) for k in "xy"}
        made = train_cohorts(
            self.lab.module,
            self.cohorts(events, client_of),
            lambda at: {k: t[list(at)] for k, t in whole.items()},
            method_of(self.job, events),
            aggregate=aggregate_of(self.job, events),
            positions=positions_of(self.job),
            overlap=self.job.sync.client_compression.overlap,
            feedback=self.job.sync.client_compression.feedback,
            **local_training(self.job),
        )
        got = exported(world, run)
        assert got.keys() == made.shared.keys()
        for name, tensor in made.shared.items():
            torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)
        return [e.round_done for e in events if e.HasField("round_done")]

    def cohorts(
        self, events: Sequence[broker_pb2.RunEvent], client_of: Sequence[int]
    ) -> list[list[ClientWork]]:
        sizes = [len(a["x"]) for a in self.arrays]
        first, work = np.cumsum([0, *sizes]), dict[int, broker_pb2.RoundWork]()
        found = list[list[ClientWork]]()
        for event in events:
            if event.HasField("round_begun"):
                work |= {w.replica: w for w in event.round_begun.work}
            elif event.HasField("round_done"):
                found.append([])
                for member in event.round_done.members:
                    client, behind = client_of[member.replica], member.behind
                    places = places_of(work[member.replica].cohort)
                    number = event.round_done.round - behind
                    assert cohort_of(len(self.train), self.job.seed, number, places) == [client]
                    weight = self.train[client] if self.job.sync.weight == "samples" else 1
                    told = work[member.replica]
                    sent = (told.kept[0], told.weights[0]) if told.kept else (None, weight)
                    if told.kept:
                        assert member.weight == sent[1]
                    else:
                        assert samples_of(member) == weight
                    one = Participant(client, first[client] + np.arange(self.train[client]))
                    (plan,) = batches(
                        [one],
                        seed=self.job.seed,
                        round_=number,
                        batch=self.job.train.batch,
                        passes=self.job.sync.local.passes,
                        steps=self.job.sync.local.steps,
                    )
                    own = [b.tolist() for b in plan]
                    new = bool(told.lost) or not all(told.trained)
                    found[-1].append(ClientWork(client, own, sent[1], sent[0], new, behind))
        return found


@pytest.fixture
def hosts(laboratory: Callable[[Job], Any], tmp_path: Path) -> Hosts:
    return Hosts.of(laboratory(job_of(tmp_path, "fedavgm")), tmp_path)


def test_who_is_in_a_round_takes_turns(hosts: Hosts) -> None:
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.finish(run)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [2] * 4
    assert len({tuple(m.replica for m in d.members) for d in done}) > 1
    record = world.broker.machine.decided.runs[run]
    again = RunRecord(record.run, [])
    again.restore(record.kept())
    clients = [r.client for r in record.replicas]
    assert [r.client for r in again.replicas] == clients, "of a journal that was written anew"
    told = [e.evaluated for e in world.events(run) if e.HasField("evaluated")]
    assert [t.replicas for t in told] == [2, 0], "the last one is by who brings the weights"


def test_asked_to_finish_they_end_with_the_round_under_way(hosts: Hosts) -> None:
    world = hosts.world()
    run, checks = world.submit(hosts.spec), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if isinstance(seen.record, Publish) and seen.record.event.round_begun.round == 1:
            world.after(0.0, finish)

    def finish() -> None:
        world.broker.ask(lambda request: RunAsked(request, RunId(run), "finish"))

    world.observe = observe
    world.finish(run)
    assert len(hosts.assert_expected(world, run)) == 2


def test_of_more_than_are_wanted_the_first_to_come_make_the_round(hosts: Hosts) -> None:
    asked = replace(hosts.job.sync, over_select=1.5)
    hosts.spec.job = replace(hosts.job, sync=asked).to_json()
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.until(lambda: any(e.HasField("round_begun") for e in world.events(run)))
    world.stretch("h1", 1e6)
    world.finish(run)
    done = hosts.assert_expected(world, run)
    begun = [e.round_begun.work for e in world.events(run) if e.HasField("round_begun")]
    assert len(begun[0]) == 3, "two are wanted, and half as many more are asked"
    assert [len(d.members) for d in done] == [2] * 4
    assert any(1 not in {m.replica for m in d.members} for d in done)


@pytest.mark.parametrize(
    "aggregate", ["median", "trimmed-mean", pytest.param("flag", marks=pytest.mark.slow)]
)
def test_hosts_that_may_be_wrong_are_borne_with(hosts: Hosts, aggregate: str) -> None:
    byzantine: Any = 1 if aggregate == "trimmed-mean" else "20%"
    sync = replace(
        hosts.job.sync, aggregate=aggregate, byzantine=byzantine, weight="equal", per_round=3
    )
    hosts.job = replace(hosts.job, sync=sync)
    hosts.spec.job = hosts.job.to_json()
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.finish(run)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [3] * 4


def test_hosts_keep_control_variates_and_a_new_start_has_none(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    job = job_of(tmp_path, "fedavg", 6)
    sync = replace(
        job.sync, method="scaffold", local=LocalWork(steps=3), weight="equal", options={"lr": 0.8}
    )
    job = replace(job, name="hosts", sync=sync, train=replace(job.train, momentum=0.0))
    hosts = Hosts.of(laboratory(job), tmp_path)
    hosts.job = replace(hosts.job, sync=replace(hosts.job.sync, per_round=3))
    hosts.spec.job = hosts.job.to_json()
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.finish(run)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [3] * 6
    events = world.events(run)
    assert [e.round_begun.round for e in events if any(w.afresh for w in e.round_begun.work)] == [0]
    world = hosts.world()  # with one that dies, and comes back with an empty disk
    run, checks, seen_rounds = world.submit(hosts.spec), world.observe, 0
    spec = next(p for p in hosts.peers if p.name == "h1")

    def observe(seen: Any) -> None:
        nonlocal seen_rounds
        checks(seen)
        seen_rounds += isinstance(seen.record, BeginRound) and seen.who == "h1"
        if seen_rounds == 3 and world.peers["h1"].alive and world.peers["h1"].incarnation == 0:
            world.kill("h1")
            world.after(0.2, lambda: world.join(spec))
            world.stretch("h0", 1e5)

    world.observe = observe
    world.finish(run)
    hosts.assert_expected(world, run)
    method = method_of(hosts.job, world.events(run))
    assert any(method.lost.values()), "it was found to have none"


UPDATE = 6 * 8 + 8 + 8 * 3 + 3
RATES = {"h0": 2e4, "h1": 4e4, "h2": 8e4}


@pytest.mark.parametrize(
    ("compression", "feedback"),
    [
        pytest.param("topk", "none", marks=pytest.mark.slow),
        ("topk", "ef"),
        ("bcrs", "none"),
        pytest.param("bcrs+opwa", "none", marks=pytest.mark.slow),
        pytest.param("bcrs+opwa", "ef", marks=pytest.mark.slow),
    ],
)
def test_hosts_send_as_much_as_their_measured_uplinks_carry_in_the_same_time(
    laboratory: Callable[[Job], Any], tmp_path: Path, compression: Any, feedback: Any
) -> None:
    hosts = Hosts.of(laboratory(job_of(tmp_path, "fedavg", 5)), tmp_path)
    options = CompressionOptions(least_ratio=0.05, alpha=0.5 if "bcrs" in compression else 1.0)
    sync = replace(
        hosts.job.sync,
        per_round=3,
        compression=compression,
        compression_options=options,
        client_feedback=feedback,
    )
    hosts.job = replace(hosts.job, sync=sync)
    hosts.spec.job = hosts.job.to_json()
    hosts.peers = [replace(p, up=RATES.get(p.name, p.up)) for p in hosts.peers]
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.finish(run)
    done = hosts.assert_expected(world, run)
    assert [len(d.members) for d in done] == [3] * 5
    events = world.events(run)
    replicas = [r for e in events if e.HasField("formed") for r in e.formed.replicas]
    for begun in (e.round_begun for e in events if e.HasField("round_begun")):
        kept = {replicas[w.replica].client: w.kept[0] for w in begun.work}
        least = max(1, round(0.05 * UPDATE))
        assert kept[0] == least
        if "bcrs" not in compression:
            assert set(kept.values()) == {least}
        else:
            assert least < kept[1] < kept[2] < UPDATE, kept
    assert all(d.uploads.clients == 3 for d in done)


WIDE = MODEL.replace(
    "nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)",
    "nn.Linear(6, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3)",
)


@pytest.mark.slow
def test_uploads_end_together_once_a_round_has_shown_what_lines_carry(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes say that all lines are alike; and a broker that starts again goes by what it knew. In
    the round of the restart uploads share their lines with what peers say to it."""

    def believed(self: Probing, peers: Sequence[PeerId], now: float) -> Network:
        return uniform(peers, 0.02, 1e5)

    monkeypatch.setattr(Probing, "network", believed)
    job = job_of(tmp_path, "fedavg", 6)
    (tmp_path / "model.py").write_text(WIDE)
    hosts = Hosts.of(laboratory(replace(job, name="wide")), tmp_path, (*SAMPLES, 20))
    options = CompressionOptions(least_ratio=0.05, alpha=0.0)
    sync = replace(hosts.job.sync, per_round=4, compression="bcrs", compression_options=options)
    hosts.job = replace(hosts.job, sync=sync)
    hosts.spec.job = hosts.job.to_json()
    names = (*(PeerId(p.name) for p in hosts.peers), PeerId("broker"))
    rates = {"h0": 1.2e4, "h1": 4e3, "h2": 8e3, "h3": 1e4}
    up = np.array([rates.get(name, 1e7) for name in names])
    world = hosts.lab.world(hosts.peers, wan=Wan(replace(uniform(names, 0.02, 1e7), up=up)))
    Monitor(world)
    run, checks, lasted = world.submit(hosts.spec), world.observe, dict[tuple[int, str], float]()

    def observe(seen: Any) -> None:
        checks(seen)
        if isinstance(seen.record, Publish) and seen.record.event.round_begun.round == 4:
            world.restart_broker(1.0)
        if isinstance(seen.record, PeerTell) and seen.record.message.round.attempt:
            said = seen.record.message.round
            lasted[said.round, seen.who] = said.upload_s

    world.observe = observe
    world.finish(run)
    hosts.assert_expected(world, run)
    spreads = []
    for number in range(6):
        found = [s for (at, _), s in lasted.items() if at == number and s]
        assert len(found) == 3, "one adds up, and sends nothing"
        spreads.append(max(found) / min(found) - 1)
    assert spreads[0] > 1
    assert max(spreads[3], spreads[5]) < 0.15, f"of both brokers: {spreads}"


def test_hosts_add_up_as_much_as_their_lines_carry(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.job = replace(hosts.job, sync=replace(hosts.job.sync, per_round=3))
    hosts.spec.job = hosts.job.to_json()
    hosts.peers = [replace(p, up=RATES.get(p.name, p.up)) for p in hosts.peers]
    planned, plans = list[dict[PeerId, broker_pb2.RoundPlan]](), ExchangePlanner.plans

    def seen(planner: ExchangePlanner, groups: Any) -> Any:
        planned.append(plans(planner, groups))
        return planned[-1]

    monkeypatch.setattr(ExchangePlanner, "plans", seen)
    monkeypatch.setattr(segments, "UNDIVIDED", 4)
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.finish(run)
    hosts.assert_expected(world, run)
    for made in planned:
        adds = dict.fromkeys(RATES, 0)
        for peer, plan in made.items():
            own = (s.stop - s.start for s in plan.segments if s.aggregator == peer)
            adds[peer] += sum(own)
        for name, up in RATES.items():
            wanted = UPDATE * up / (RATES["h1"] + RATES["h2"]) if name != "h0" else 0
            assert adds[name] == pytest.approx(wanted, rel=0.1, abs=2), adds


def test_another_peer_of_a_host_goes_on_with_its_client(hosts: Hosts) -> None:
    hosts.peers.append(PeerSpec(name="h1-twin", place="s1", data=hosts.peers[2].data))
    world = hosts.world()
    run, checks = world.submit(hosts.spec), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if isinstance(seen.record, BeginRound) and world.peers["h1"].alive:
            world.kill("h1")

    world.observe = observe
    world.finish(run)
    hosts.assert_expected(world, run)
    record = world.broker.machine.decided.runs[run]
    (twin,) = (r for r in record.replicas if r.client == 1)
    assert twin.peers == ("h1-twin",), "its data is there"


@pytest.mark.parametrize("returns", [pytest.param(False, marks=pytest.mark.slow), True])
def test_whichever_host_is_lost_at_any_moment_the_others_go_on(hosts: Hosts, returns: bool) -> None:
    def play(deadly: int, lost: str) -> tuple[Any, str, int]:
        world = hosts.world()
        spec = next(p for p in hosts.peers if p.name == lost)

        def lose(number: int) -> None:
            if number == deadly and world.peers[lost].alive:
                world.kill(lost)
                if returns:
                    world.after(2.0, lambda: world.join(spec))

        run, count = in_rounds(world, hosts.spec, lose)
        return world, run, count

    _, _, records = play(0, "h1")
    without = 0
    for part in range(1, 7, 2):
        lost = f"h{part % 3}"
        world, run, _ = play(records * part // 7, lost)
        done = hosts.assert_expected(world, run)
        without += any(len(d.members) < 2 for d in done)
    assert without or returns, "nobody was ever missing"


def test_an_owner_who_withdraws_is_gone_from_the_next_round_on(hosts: Hosts) -> None:
    """Clients make no step behind which it could leave: it had stayed for all of drain_s."""
    world = hosts.world()
    run, _ = in_rounds(world, hosts.spec, lambda number: world.leave("h1") if number == 3 else None)
    done = hosts.assert_expected(world, run)
    formed = next(e.formed for e in world.events(run) if e.HasField("formed"))
    [left] = [n for n, r in enumerate(formed.replicas) if [*r.peers] == ["h1"]]
    assert not any(m.replica == left for d in done[1:] for m in d.members)


def test_whenever_the_broker_is_started_again_each_trains_its_own(hosts: Hosts) -> None:
    def play(deadly: int) -> tuple[Any, str, int]:
        world = hosts.world()
        run, written = broker_again(world, hosts.spec, deadly)
        return world, run, written

    _, _, records = play(0)
    for deadly in range(2, records, 8):
        world, run, _ = play(deadly)
        hosts.assert_expected(world, run)
