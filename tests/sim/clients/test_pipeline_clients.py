"""Clients of which a replica that is a pipeline trains one after the other, in the simulated world:
against a plain loop of them, and against peers that have the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.broker.events import Persist
from shoal.broker.policies.federated import FederatedPolicy
from shoal.dag.plan.action import Kind
from shoal.job import Job, SettingsError
from shoal.job.clients.local_work import LocalWork
from shoal.peer.core.events import Build, Compute
from shoal.proto.broker_pb2 import DONE
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.round_hashes import expected_rounds
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain.client_loops import train_cohorts
from shoal.sim.plain.plain_cohorts import committed_cohorts, local_training, method_of
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.clients.test_federated_world import exported, job_of

MODEL = """
from torch import nn

class Classifier(nn.Module):
    def __init__(self, weighs):
        super().__init__()
        self.weighs = weighs
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)
        )

    def forward(self, x, y):
        made, count = self.layers(x), (y != -100).sum()
        if not self.weighs:
            return nn.functional.cross_entropy(made, y)
        total = nn.functional.cross_entropy(made, y, reduction="sum")
        return {"loss": total / count.clamp(min=1), "weight": count.float()}

def deep(weighs=False):
    return Classifier(weighs)
"""
STRONG = PeerSpec(name="strong", place="a")
WEAK = [PeerSpec(name=f"weak{i}", place="b", memory_bytes=4000) for i in range(3)]
SPARE = PeerSpec(name="spare", place="b", memory_bytes=4000)


def deep_job(folder: Path, method: str = "fedavg", **tables: dict[str, Any]) -> Job:
    """A job whose model is too large for a weak peer."""
    job = job_of(folder, method, 2)
    if tables.get("model"):
        with np.load(folder / "data.npz") as found:
            some = np.arange(len(found["y"])) % 7 == 0
            np.savez(folder / "data.npz", x=found["x"], y=np.where(some, -100, found["y"]))
    (folder / "deep.py").write_text(MODEL)
    model = replace(job.model, factory=str(folder / "deep.py") + ":deep", **tables.get("model", {}))
    train = replace(job.train, **({"microbatch": 1} | tables.get("train", {})))
    plan = replace(job.plan, **({"replicas": 1} | tables.get("plan", {})))
    sync = replace(job.sync, **({"per_round": 4} | tables.get("sync", {})))
    return replace(job, model=model, train=train, plan=plan, sync=sync)


def played(
    lab: Any, peers: list[PeerSpec], watch: Callable[..., None] | None = None, **options: Any
) -> Any:
    """The world of a run that has ended, and its id. `watch` sees all that is observed."""
    world = lab.world(peers, **options)
    Monitor(world)
    world.until(lambda: len(world.broker.machine.members.pool) == len(peers))
    run, checks = world.submit(lab.spec), world.observe

    def observe(seen: Observed) -> None:
        checks(seen)
        if watch is not None:
            watch(world, seen)

    world.observe = observe
    world.finish(run)
    return world, run


def stages(world: Any, run: str) -> list[int]:
    return [len(e.plan.stages) for e in world.events(run) if e.HasField("plan")]


def assert_plain(lab: Any, world: Any, run: str) -> dict[str, Tensor]:
    """It is done, and its weights, which are returned, are those of a plain loop over the clients
    that it committed."""
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    job, reader = lab.job, lab.reader()
    made = train_cohorts(
        lab.module,
        committed_cohorts(events, job, reader),
        lambda at: reader.samples(np.array(at)),
        method_of(job),
        **local_training(job),
    )
    got: dict[str, Tensor] = exported(world, run)
    assert got.keys() == made.shared.keys()
    for name, tensor in made.shared.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-5, atol=1e-6)
    return got


ADAMW = {"optimizer": "adamw", "lr": 0.01, "clip": 0.5, "schedule": "linear", "momentum": 0.0}


@pytest.mark.parametrize(
    ("method", "tables"),
    [
        ("fedavg", {}),
        ("fedprox", {}),
        ("fedprox", {"train": {"clip": 0.3}}),
        ("fednova", {"train": {"momentum": 0.9}}),
        ("fedadam", {"train": ADAMW, "sync": {"local": LocalWork(steps=3)}}),
        pytest.param(
            *("fedavgm", {"train": {"clip": 0.3}, "sync": {"weight": "equal"}}),
            marks=pytest.mark.slow,
        ),
        ("fedavg", {"model": {"args": {"weighs": True}}, "train": {"momentum": 0.0}}),
    ],
)
def test_a_pipeline_of_three_is_a_plain_loop(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str, tables: dict[str, Any]
) -> None:
    lab = laboratory(deep_job(tmp_path, method, plan={"stages": 3}, **tables))
    world, run = played(lab, [PeerSpec(name=f"p{i}") for i in range(3)])
    assert stages(world, run) == [3]
    assert_plain(lab, world, run)
    cohorts = [*committed_cohorts(world.events(run), lab.job, lab.reader())]
    sizes = {len(b) for cohort in cohorts for work in cohort for b in work.batches}
    assert sizes > {4}, "all batches are whole"


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), "auto"])
def test_a_pipeline_of_weak_peers_beside_one_peer_is_two_peers(
    laboratory: Callable[[Job], Any], tmp_path: Path, replicas: int | str
) -> None:
    lab = laboratory(deep_job(tmp_path, "fedadam", plan={"replicas": replicas}))
    world, run = played(lab, [STRONG, *WEAK])
    assert sorted(stages(world, run)) == [1, 3]
    got = assert_plain(lab, world, run)
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    assert [len(d.members) for d in done] == [2] * 2
    other, same = played(lab, [STRONG, replace(STRONG, name="other")])
    assert stages(other, same) == [1, 1]
    for name, tensor in assert_plain(lab, other, same).items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)
    whole = [e.round_done for e in other.events(same) if e.HasField("round_done")]
    for mine, its in zip(done, whole, strict=True):
        assert mine.clients_moved == pytest.approx(its.clients_moved, rel=1e-4)
        assert mine.mean_moved == pytest.approx(its.mean_moved, rel=1e-4)


@pytest.mark.parametrize(
    "moments", [(2, 17), pytest.param((1, 5, 9, 11, 13, 16, 18), marks=pytest.mark.slow)]
)
def test_whoever_is_lost_from_a_pipeline_each_client_counts_once(
    laboratory: Callable[[Job], Any], tmp_path: Path, moments: tuple[int, ...]
) -> None:
    lab, inside = laboratory(deep_job(tmp_path, plan={"stages": 3})), list[int]()
    for deadly in moments:
        updates, terms = 0, set[int]()

        def watch(world: Any, seen: Observed, deadly: int = deadly, terms: Any = terms) -> None:
            nonlocal updates
            record = seen.record
            updates += isinstance(record, Compute) and record.action.kind is Kind.UPDATE
            if updates >= 3 * deadly and world.peers["weak1"].alive:
                world.kill("weak1")
            if isinstance(record, Build):
                terms.add(record.assign.term)
                if record.assign.term > 1:
                    inside.append(record.assign.first_step - record.assign.round.first_step)

        world, run = played(lab, [*WEAK, SPARE], watch)
        assert terms > {1}, "nobody was lost"
        assert_plain(lab, world, run)
        done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
        assert [len(d.members) for d in done] == [1] * 2
    assert max(inside) > 8, "no snapshot had a sum of clients"


def test_whenever_the_broker_is_started_again_nothing_changes(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(deep_job(tmp_path, "fedavgm", plan={"replicas": 2}))

    def play(deadly: int) -> tuple[list[int], list[Any], int]:
        written = 0

        def watch(world: Any, seen: Observed) -> None:
            nonlocal written
            written += isinstance(seen.record, Persist)
            if isinstance(seen.record, Persist) and written == deadly:
                world.restart_broker(1.0)

        world, run = played(lab, [STRONG, *WEAK], watch)
        assert_plain(lab, world, run)
        done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
        work = [e.round_begun.work for e in world.events(run) if e.HasField("round_begun")]
        cohorts = [[(w.replica, w.cohort, w.steps) for w in works] for works in work]
        return [d.hash for d in done], cohorts, written

    hashes, cohorts, records = play(0)
    assert len(hashes) == 2
    same = 0
    for deadly in range(8, records, records // 2):
        found, others, _ = play(deadly)
        if others == cohorts:  # as replicas took as long
            assert found == hashes, deadly
            same += 1
    assert same, "work was always divided in another way"


def test_one_peer_goes_on_with_steps_of_a_pipeline(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(self: FederatedPolicy, replica: Any, round_: int, places: Any) -> int:
        plan, shown = replica.plan, SimpleNamespace(stages=(None, None))
        return original(self, SimpleNamespace(plan=plan and shown), round_, places)

    original = FederatedPolicy._steps
    monkeypatch.setattr(FederatedPolicy, "_steps", steps)
    lab = laboratory(deep_job(tmp_path, "fedprox", plan={"replicas": 2}))
    world, run = played(lab, [STRONG, replace(STRONG, name="other")])
    assert stages(world, run) == [1, 1]
    assert any(e.HasField("step") for e in world.events(run))
    assert_plain(lab, world, run)


def test_ghosts_come_to_what_a_loop_of_hashes_makes_of_committed_clients(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(deep_job(tmp_path, plan={"replicas": 2}))
    killed = False

    def watch(world: Any, seen: Observed) -> None:
        nonlocal killed
        updates = isinstance(seen.record, Compute) and seen.record.action.kind is Kind.UPDATE
        if updates and not killed:
            killed = True
            world.kill("weak1")

    world, run = played(lab, [STRONG, *WEAK, SPARE], watch, device=Ghosts())
    events, graph = world.events(run), lab.graph.bind(1)
    assert killed
    begun = [w for e in events if e.HasField("round_begun") for w in e.round_begun.work]
    assert {bool(w.steps) for w in begun} == {False, True}
    rounds = committed_rounds(
        events, microbatches=1, microbatch_size=1, clients=12, seed=lab.job.seed
    )
    loop = expected_rounds(graph, lab.job.seed, rounds, 1, clips=False)
    assert [e.round_done.hash for e in events if e.HasField("round_done")] == loop.versions


def test_a_client_that_diverges_in_a_pipeline_takes_its_replica_out_of_the_round(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    job = deep_job(tmp_path, plan={"replicas": 2}, sync={"per_round": 9})
    with np.load(tmp_path / "data.npz") as found:
        x = found["x"].copy()
        x[17] = np.inf
        np.savez(tmp_path / "data.npz", x=x, y=found["y"])
    lab = laboratory(replace(job, name="odd"))
    world, run = played(lab, [*WEAK, STRONG])
    assert_plain(lab, world, run)
    events = world.events(run)
    assert any("does not count" in e.note or "left out" in e.note for e in events)
    cohorts = committed_cohorts(events, lab.job, lab.reader())
    assert not any(17 in batch for c in cohorts for work in c for batch in work.batches)


@pytest.mark.parametrize(
    ("peers", "tables", "why"),
    [
        (WEAK, {"train": {"microbatch": 2}}, "which microbatches of 2 do not divide"),
        (WEAK, {"plan": {"stages": 1}}, "plan.stages is 1"),
        (WEAK, {"sync": {"aggregate": "median", "weight": "equal"}}, "sync.aggregate"),
    ],
)
def test_it_is_said_why_weak_peers_cannot_train_a_client_together(
    laboratory: Callable[[Job], Any], tmp_path: Path, peers: Any, tables: Any, why: str
) -> None:
    lab = laboratory(deep_job(tmp_path, **tables))
    world = lab.world(peers)
    run = world.submit(lab.spec)

    def said() -> bool:
        reasons = [e.state.reason.text for e in world.events(run) if e.HasField("state")]
        return any("cannot train a client together" in r and why in r for r in reasons)

    world.until(said, 30.0)


def test_stages_that_cannot_be_are_refused_with_the_run(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(deep_job(tmp_path, plan={"stages": 3}, train={"microbatch": 2}))
    with pytest.raises(ValueError, match="microbatches of 2 do not divide; set train"):
        lab.world(WEAK).submit(lab.spec)


def test_a_model_whose_samples_meet_has_no_stages(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    job = deep_job(tmp_path, plan={"stages": 3})
    text = (tmp_path / "deep.py").read_text().replace("made, y)", "made - made.mean(0), y)")
    (tmp_path / "deep.py").write_text(text)
    with pytest.raises(SettingsError, match="cannot be trained by several peers: sub"):
        laboratory(job)
    open_ = replace(job, name="open", plan=replace(job.plan, stages="auto"))
    assert laboratory(open_).job.plan.stages == 1
