"""Clients that peers train in rounds, in the simulated world: through broker and peers, against a
plain loop over the same cohorts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from shoal.dag.rounds.cohorts import cohort_of, places_of
from shoal.job import Job
from shoal.job.clients.local_work import LocalWork
from shoal.job.clients.partitioning import Partitioning
from shoal.peer.core.events import BeginRound
from shoal.peer.data.partition import partition_of
from shoal.proto.broker_pb2 import DONE, FAILED
from shoal.sim.ghost import ghost_clients
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.round_hashes import expected_rounds
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain.client_loops import train_cohorts
from shoal.sim.plain.client_methods import (
    ClientUpdate,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedNova,
    FedProx,
    FedYogi,
    copies,
)
from shoal.sim.plain.plain_cohorts import committed_cohorts, expected_versions, last_version
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.clients.moments import broker_again, losing

MODEL = """
from torch import nn

def small():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x, y):
            made = self.layers(x)
            right = (made.argmax(1) == y).float().mean()
            return {"loss": nn.functional.cross_entropy(made, y), "accuracy": right}

    return Classifier()
"""
METHODS: dict[str, tuple[dict[str, Any], FedAvg]] = {
    "fedavg": ({}, FedAvg()),
    "fedprox": ({"mu": 0.3}, FedProx(0.3)),
    "fednova": ({}, FedNova()),
    "fedavgm": ({"lr": 0.5, "momentum": 0.8}, FedAvgM(0.5, 0.8)),
    "fedadam": ({"lr": 0.02}, FedAdam(0.02)),
    "fedyogi": ({"lr": 0.02}, FedYogi(0.02)),
    "fedadagrad": ({"lr": 0.02}, FedAdagrad(0.02)),
}


def job_of(folder: Path, method: str, rounds: int = 4) -> Job:
    rng = np.random.default_rng(0)
    (folder / "model.py").write_text(MODEL)
    x = rng.normal(size=(120, 6)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0))
    options, _ = METHODS[method]
    return Job.from_table(
        {
            "version": 1,
            "name": f"federated {method}",
            "model": {"factory": str(folder / "model.py") + ":small"},
            "data": {
                **{"kind": "arrays", "source": str(folder / "data.npz"), "holdout": 0.1},
                "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 12, "seed": 3},
            },
            "sync": {
                **{"kind": "federated", "method": method, "per_round": 5},
                **{"local": {"passes": 2}, "options": options},
            },
            "plan": {"replicas": 3},
            "train": {
                **{"rounds": rounds, "batch": 4, "lr": 0.2, "optimizer": "sgd", "momentum": 0.5},
                **{"schedule": "constant", "warmup": 0, "clip": 0.0, "weight_decay": 0.0},
                **{"eval_every": 2, "eval_batches": 1},
            },
        }
    )


def world_of(lab: Any, peers: int = 3, **options: Any) -> Any:
    world = lab.world([PeerSpec(name=f"p{i}", place=f"s{i}") for i in range(peers)], **options)
    Monitor(world)
    return world


def assert_expected(lab: Any, world: Any, run: str, rule: FedAvg | None = None) -> list[Any]:
    """It is done, and its weights are those of a plain loop over what it committed, by `rule` if
    that is another than the method's. Returns the rounds."""
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    got = exported(world, run)
    job, reader = lab.job, lab.reader()
    made = train_cohorts(
        lab.module,
        committed_cohorts(events, job, reader),
        lambda at: reader.samples(np.array(at)),
        rule or METHODS[job.sync.chosen][1],
        lr=job.train.lr,
        momentum=job.train.momentum,
        overlap=job.sync.client_compression.overlap,
    )
    assert got.keys() == made.shared.keys()
    for name, tensor in made.shared.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)
    return [e.round_done for e in events if e.HasField("round_done")]


@pytest.mark.parametrize("method", METHODS)
def test_the_version_is_that_of_a_plain_loop(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str
) -> None:
    lab = laboratory(job_of(tmp_path, method))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    done = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [3] * 4
    partition = partition_of(lab.job.data.partition, "y", lab.reader())
    sizes = partition.sizes - partition.held_out_sizes
    clients = cohort_of(12, lab.job.seed, 0, range(5))
    assert sum(m.weight for m in done[0].members) == sum(sizes[c] for c in clients)


@pytest.mark.parametrize("method", ["fedavgm", "fedadam"])
def test_a_plain_loop_has_the_options_that_a_job_leaves_out(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str
) -> None:
    job = job_of(tmp_path, method)
    open_ = replace(job, name=f"{method} as it is", sync=replace(job.sync, options={}))
    lab = laboratory(open_)
    world = world_of(lab)
    run = world.submit(lab.spec)
    events = world.finish(run)
    said = {
        e.evaluated.step: e.evaluated.evaluation.loss for e in events if e.HasField("evaluated")
    }
    wanted = expected_versions(lab.module, lab.job, events, lab.reader(), size=4)
    assert wanted == pytest.approx(said, rel=1e-4)


@pytest.mark.parametrize("peers", [1, 2])
def test_the_planner_says_how_many_peers_train_clients(
    laboratory: Callable[[Job], Any], tmp_path: Path, peers: int
) -> None:
    job = job_of(tmp_path, "fedavg")
    open_ = replace(job, name="federated auto", plan=replace(job.plan, replicas="auto"))
    lab = laboratory(open_)
    world = world_of(lab, peers=peers)
    run = world.submit(lab.spec)
    world.finish(run)
    done = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [peers] * 4


@pytest.mark.parametrize("peers", [1, 2])
def test_lengths_of_clients_count_alike_however_many_peers_there_are(
    laboratory: Callable[[Job], Any], tmp_path: Path, peers: int
) -> None:
    job = job_of(tmp_path, "fednova", 2)
    lab = laboratory(replace(job, plan=replace(job.plan, replicas=peers)))
    world = world_of(lab, peers)
    run = world.submit(lab.spec)
    world.finish(run)
    done = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [peers] * 2


def test_clients_that_make_as_many_steps_move_as_without_normalising(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    def hashes(method: str) -> list[int]:
        job = job_of(tmp_path, method, 2)
        lab = laboratory(replace(job, sync=replace(job.sync, local=LocalWork(steps=3))))
        world = world_of(lab)
        run = world.submit(lab.spec)
        events = world.finish(run)
        return [e.round_done.hash for e in events if e.HasField("round_done")]

    assert hashes("fednova") == hashes("fedavg"), "to the bit"


@pytest.mark.parametrize(
    ("method", "moments"),
    [("fedavgm", 7), pytest.param("fednova", 4, marks=pytest.mark.slow)],
)
def test_whoever_is_lost_at_any_moment_its_clients_are_left_out(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str, moments: int
) -> None:
    lab = laboratory(job_of(tmp_path, method))

    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(lab)
        run, count = losing(world, lab.spec, deadly)
        return world, run, count

    _, _, records = play(0)
    smaller = 0
    for part in range(1, moments):
        world, run, _ = play(records * part // moments)
        done = assert_expected(lab, world, run)
        smaller += any(len(d.members) < 3 for d in done)
    assert smaller, "nobody was ever left out"


def test_with_the_only_peer_of_clients_the_version_is_lost(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    """Nobody else has it, whoever could take that one's place: the run says so, and ends."""
    job = job_of(tmp_path, "fedavg")
    lab = laboratory(replace(job, plan=replace(job.plan, replicas=1)))
    world = world_of(lab, 2)
    world.until(lambda: len(world.broker.machine.members.pool) == 2)
    run, checks, begun = world.submit(lab.spec), world.observe, 0

    def observe(seen: Any) -> None:
        nonlocal begun
        checks(seen)
        begun += isinstance(seen.record, BeginRound)
        if begun == 2 and world.peers["p0"].alive:
            world.kill("p0")

    world.observe = observe
    world.finish(run)
    state = world.events(run)[-1].state
    assert state.phase == FAILED
    assert "no replica has a contribution" in state.reason.text


def test_whenever_the_broker_is_started_again_nothing_changes(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(job_of(tmp_path, "fedadam"))

    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(lab)
        run, written = broker_again(world, lab.spec, deadly)
        return world, run, written

    world, run, records = play(0)
    hashes = [d.hash for d in assert_expected(lab, world, run)]
    for deadly in range(2, records, 7):
        world, run, _ = play(deadly)
        done = assert_expected(lab, world, run)
        if all(len(d.members) == 3 for d in done):
            assert [d.hash for d in done] == hashes


def test_ghosts_come_to_what_a_loop_of_hashes_makes_of_committed_clients(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = laboratory(job_of(tmp_path, "fedavg"))
    graph = lab.graph.bind(lab.job.train.microbatch_size)

    def play() -> tuple[list[int], list[int]]:
        world = world_of(lab, device=Ghosts())
        run = world.submit(lab.spec)
        events = world.finish(run)
        rounds = committed_rounds(
            events, microbatches=1, microbatch_size=1, clients=12, seed=lab.job.seed
        )
        loop = expected_rounds(graph, lab.job.seed, rounds, 1, clips=False)
        return [e.round_done.hash for e in events if e.HasField("round_done")], loop.versions

    found, wanted = play()
    assert found == wanted
    assert len(set(found)) == 4
    monkeypatch.setattr(ghost_clients, "places_of", lambda ranges: places_of(ranges)[:-1])
    found, wanted = play()  # a client of each was left out
    assert found != wanted


@pytest.mark.parametrize(("method", "rule"), [("fedavg", FedAvg), ("fednova", FedNova)])
def test_clients_moves_and_own_samples_are_told_as_a_plain_loop_has_them(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str, rule: type[FedAvg]
) -> None:
    job = job_of(tmp_path, method)
    assert job.data.partition is not None
    partition = replace(job.data.partition, held_out=0.4)
    lab = laboratory(replace(job, data=replace(job.data, partition=partition)))
    world = world_of(lab)
    run = world.submit(lab.spec)
    events = world.finish(run)
    reader = lab.reader()
    divided = partition_of(partition, "y", reader)
    own = [at for at in map(divided.held_out, range(12)) if len(at)]
    assert max(map(len, own)) > job.train.batch > min(map(len, own)), "batches of many sizes"

    def plain(state: dict[str, Tensor], number: str) -> list[float]:
        each = [
            float(torch.func.functional_call(lab.module, state, (), reader.samples(at))[number])
            for at in own
        ]
        mean = sum(x * len(at) for x, at in zip(each, own, strict=True)) / sum(map(len, own))
        return [mean, min(each), float(np.median(each)), max(each)]

    versions: list[dict[str, Tensor]] = []
    moves: list[tuple[float, float]] = []

    cohorts = lab.job.rounds.cohorts
    sizes = divided.sizes - divided.held_out_sizes

    def length(size: int) -> float:
        return FedNova.length(2 * -(-size // lab.job.train.batch), lab.job.train.momentum)

    class Watched(rule):  # type: ignore[misc, valid-type]
        def commit(self, count: int, came: Sequence[ClientUpdate]) -> None:
            each = [torch.cat([t.flatten() for t in u.moved.values()]) for u in came]
            if method == "fednova":
                drawn = cohort_of(12, lab.job.seed, count, range(cohorts.per_round))
                longest = max(length(sizes[c]) for c in drawn)
                each = [
                    m * longest / length(sizes[u.client]) for m, u in zip(each, came, strict=True)
                ]
            shares = torch.tensor([u.share for u in came], dtype=torch.float64)
            squares = torch.stack([m.square().sum() for m in each])
            mean = (shares @ torch.stack(each)).norm()
            moves.append((float((shares @ squares).sqrt()), float(mean)))
            super().commit(count, came)

    train_cohorts(
        lab.module,
        committed_cohorts(events, lab.job, reader),
        lambda at: reader.samples(np.array(at)),
        Watched(),
        lr=lab.job.train.lr,
        momentum=lab.job.train.momentum,
        committed=lambda _, made: versions.append(copies(made.shared)),
    )
    done = [e.round_done for e in events if e.HasField("round_done")]
    assert len(moves) == len(done)
    for d, wanted in zip(done, moves, strict=True):
        assert (d.clients_moved, d.mean_moved) == pytest.approx(wanted, rel=1e-4)
    found = [e.evaluated for e in events if e.HasField("evaluated")]
    assert [told.step for told in found] == [2, 4]
    for told in found:
        numbers = told.evaluation.clients
        assert [n.name for n in numbers] == ["loss", "accuracy"]
        for n in numbers:
            wanted = plain(versions[told.step - 1], n.name)
            assert n.clients == len(own)
            assert [n.mean, n.least, n.median, n.most] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fednova", "scaffold"])
def test_who_divides_by_steps_wants_each_to_be_one(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str
) -> None:
    """Clients whose batch has nothing that counts make fewer, which only their peers know."""
    job = job_of(tmp_path, "fednova", 2)
    sync = replace(job.sync, method=method, weight="equal", local=LocalWork(steps=6), options={})
    train = replace(job.train, momentum=0.0)
    job = replace(job, name=f"masked {method}", sync=sync, train=train)
    lab = laboratory(masked(job, tmp_path))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    state = world.events(run)[-1].state
    assert state.phase == FAILED
    assert "of 6 steps in round" in state.reason.text


def test_a_batch_in_which_no_sample_counts_is_no_step(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    """Neither momentum nor decay moves a client then."""
    lab = laboratory(masked(replace(job_of(tmp_path, "fedavg", 2), name="masked"), tmp_path))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    assert_expected(lab, world, run)


def masked(job: Job, folder: Path) -> Job:
    """The job with a model for which only samples of one class count."""
    mean = "nn.functional.cross_entropy(made, y)"
    counted = "nn.functional.cross_entropy(made, y, reduction='none') * (y == 2)).sum() / {}"
    text = MODEL.replace("def small", "import torch\n\n\ndef small", 1).replace(
        f'"loss": {mean}', f'"loss": ({counted.format("(y == 2).sum().clamp(min=1)")}'
    )
    (folder / "model.py").write_text(
        text.replace('"accuracy": right', '"weight": (y == 2).sum().float()')
    )
    return job


def exported(world: Any, run: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in [e.weights for e in world.events(run) if e.HasField("weights")][-1].files:
        found |= load(world.blobs[file.blob.hash])
    return found


def test_clients_by_key_are_as_many_as_the_data_has(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    job = job_of(tmp_path, "fedavgm", 3)
    with np.load(tmp_path / "data.npz") as found:
        names = np.array(["ann", "bo", "cy", "李"])[(found["x"][:, 2] > 0) * 2 + found["y"] % 2]
        np.savez(tmp_path / "data.npz", **found, who=names)
    divided = Partitioning(kind="by-key", key="who", held_out=0.2)
    job = replace(job, name="by key", data=replace(job.data, partition=divided))
    lab = laboratory(replace(job, sync=replace(job.sync, per_round="75%")))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    assert_expected(lab, world, run)
    cohorts = committed_cohorts(world.events(run), lab.job, lab.reader())
    assert [len(c) for c in cohorts] == [3] * 3, "of four"
    sizes = [int((names[:108] == name).sum()) for name in sorted({*names.tolist()})]
    assert list(lab.spec.client_sizes) == [n - int(n * 0.2 + 0.5) for n in sizes]


FROZEN = """
import torch
from torch import nn

def small():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(6, 8).requires_grad_(False)
            self.register_buffer("unread", torch.ones(3), persistent=False)
            self.register_buffer("scale", torch.full((8,), 0.5))
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            self.head = nn.Linear(8, 3)

        def forward(self, x, y):
            made = self.base(x)
            made = torch.tanh(made + self.scale * self.up(self.down(made)))
            return {"loss": nn.functional.cross_entropy(self.head(made), y)}

    return Adapted()
"""


@pytest.mark.parametrize("method", ["fednova", "fedprox"])
def test_of_a_model_that_is_partly_frozen_the_rest_is_trained(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str
) -> None:
    """Beside a buffer that nothing reads, which no stage has."""
    job = job_of(tmp_path, method)
    (tmp_path / "model.py").write_text(FROZEN)
    lab = laboratory(replace(job, name=f"frozen {method}"))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    events, got = world.events(run), exported(world, run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    wanted = last_version(lab.module, lab.job, events, lab.reader())
    assert sorted(wanted) == ["down.weight", "head.bias", "head.weight", "up.weight"]
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", ["fewer sizes", "no partition", "too long walks"])
def test_a_run_whose_clients_are_not_known_is_refused(
    laboratory: Callable[[Job], Any], tmp_path: Path, change: str
) -> None:
    lab = laboratory(job_of(tmp_path, "fedavg"))
    spec = copy.deepcopy(lab.spec)
    if change == "fewer sizes":
        del spec.client_sizes[-1]
    elif change == "too long walks":
        sync = replace(lab.job.sync, local=LocalWork(passes=2**20))
        spec.job, spec.client_sizes[3] = replace(lab.job, sync=sync).to_json(), 17
    else:
        data = replace(lab.job.data, where="peer", source="cases", partition=None)
        spec.job = replace(lab.job, data=data).to_json()
    why = "client_sizes of the run has|goes over them 1048576 times"
    with pytest.raises(ValueError, match=why):
        world_of(lab).submit(spec)
