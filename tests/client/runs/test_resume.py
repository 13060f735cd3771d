"""Going on from a checkpoint on disk: what may change, what is refused, and that it is exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.client import Refused
from shoal.client.runs import checkpoints, resume
from shoal.client.runs.checkpoints import CheckpointError
from shoal.job import Job, SettingsError
from shoal.proto.broker_pb2 import Checkpoint, RunSpec
from shoal.sim.processes import LocalCluster

JOB: dict[str, Any] = {
    "version": 1,
    "name": "resumed",
    "model": {"factory": "net.py:net", "args": {"width": 8}},
    "train": {"steps": 8, "batch": 8, "microbatch": 2, "schedule": "constant", "warmup": 0},
}


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("train.lr=1e-4", ("train", "lr"), 1e-4),
        ("name=again", ("name",), "again"),
        ("plan.stages=3", ("plan", "stages"), 3),
        ('recovery.ladder=["checkpoint"]', ("recovery", "ladder"), ("checkpoint",)),
        ("train.tokens=4096", ("train", "tokens"), 4096),
    ],
)
def test_a_key_is_changed(change: str, key: tuple[str, ...], value: Any) -> None:
    found: Any = Job.from_table(JOB).with_changes([change])
    for name in key:
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("train.lr", "expected KEY=VALUE"),
        ("train.rl=1", "did you mean"),
        ("train.lr.x=1", "not a table"),
        ("train.lr=fast", "train.lr"),
    ],
)
def test_what_is_no_change_is_refused(change: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Job.from_table(JOB).with_changes([change])


def test_what_may_not_change_is_named() -> None:
    before = Job.from_table(JOB).resolved(8)
    for change, key in (
        ("model.args.width=9", "model.args.width"),
        ("seed=3", "seed"),
        ("train.batch=16", "train.batch"),
        ("train.optimizer=sgd", "train.optimizer"),
        ("data.length=64", "data.length"),
        ("train.lr=1.0", ""),
        ("train.steps=80", ""),
        ("plan.stages=2", ""),
        ("codec.default=int8", ""),
        ("recovery.warm_spares=2", ""),
    ):
        assert resume.changed(before, before.with_changes([change])) == key


def test_a_division_that_was_left_to_the_planner_stays_as_it_was() -> None:
    wide = Job.from_table(JOB).with_changes(["train.microbatch=4"])  # the default is 2
    before = wide.resolved(8).without_places()
    auto = Job.from_table({**JOB, "train": {**JOB["train"], "microbatch": "auto"}})
    spec = RunSpec(job=before.to_json(), steps=8)
    manifest: Any = SimpleNamespace(held_out=0)
    job = resume.gone_on(spec, Checkpoint(step=4), auto.without_places(), manifest)[1]
    assert job.train.microbatch == 4
    two = Job.from_table(JOB).without_places()
    with pytest.raises(SettingsError, match=r"`train.microbatch` is 2, and the run had 4"):
        resume.gone_on(spec, Checkpoint(step=4), two, manifest)


def test_the_classes_of_a_model_stay() -> None:
    clients = {"kind": "iid", "clients": 4}
    data = {"kind": "arrays", "source": "x.npz", "partition": clients}
    sync = {"kind": "federated", "virtual_data": "vhl"}
    before = Job.from_table({**JOB, "data": data, "sync": sync}).resolved(8)
    for change, key in (
        ("sync.virtual_data=none", "sync.virtual_data"),
        ("sync.vhl.classes=3", "sync.vhl.classes"),
        ("sync.vhl.features=body", "sync.vhl.features"),
        ("sync.vhl.logits=head", "sync.vhl.logits"),
        ("sync.vhl.source=generator", ""),
        ("sync.vhl.alpha=0.5", ""),
    ):
        assert resume.changed(before, before.with_changes([change])) == key


def test_statistics_of_features_stay() -> None:
    clients = {"kind": "iid", "clients": 4}
    data = {"kind": "arrays", "source": "x.npz", "partition": clients}
    before, without = (
        Job.from_table({**JOB, "data": data, "sync": {"kind": "federated", **sync}}).resolved(8)
        for sync in ({"method": "fedimpro", "options": {"weight": 0.5}}, {})
    )
    for job, change, key in (
        (before, "sync.method=fedavg", "sync.method"),
        (without, "sync.method=fedimpro", "sync.method"),
        (before, "sync.options.share=0.5", "sync.options"),
        (before, "sync.quorum=50%", ""),
        (without, "sync.method=fedavgm", ""),
    ):
        changes = [change, *(["sync.options={}"] if change == "sync.method=fedavg" else [])]
        found = resume.changed(job, job.with_changes(changes))
        assert found.startswith(key), found
        assert bool(found) == bool(key)


@pytest.mark.parametrize(
    ("was", "becomes", "may"),
    [
        ("fedadam", "fedavgm", False),  # a mean of moves, taken for their sum
        ("fedavgm", "fedadam", False),
        ("fedavg", "fedadam", True),
        ("fedadam", "fedavg", True),
        ("fedadam", "fedadam", True),
    ],
)
def test_what_replicas_share_is_never_read_as_something_else(
    was: str, becomes: str, may: bool
) -> None:
    clients = {"kind": "iid", "clients": 4}
    data = {"kind": "arrays", "source": "x.npz", "partition": clients}
    table = {**JOB, "data": data, "sync": {"kind": "federated", "method": was}}
    before = Job.from_table(table).resolved(8)
    found = resume.changed(before, before.with_changes([f"sync.method={becomes}"]))
    assert found == ("" if may else "sync.method")


# ---------------------------------------------------------------- files


def listed(folder: Path, **entries: Any) -> Path:
    """A folder with a checkpoint of one file."""
    folder.mkdir()
    (folder / "graph").write_bytes(b"graph")
    record = {
        "version": 1,
        "folder": ".",
        "checkpoint": {"run": "r-1", "step": "4"},
        "spec": {"name": "resumed"},
        "files": {"graph": {"sha256": "0" * 64, "bytes": 5}},
    } | entries
    (folder / "checkpoint.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("name", ["runs", "run [1]*"])
def test_a_folder_is_read_or_the_newest_one_in_it(tmp_path: Path, name: str) -> None:
    tmp_path /= name
    tmp_path.mkdir()
    listed(tmp_path / "checkpoint-000004")
    listed(tmp_path / "checkpoint-000012", checkpoint={"run": "r-1", "step": "12"})
    (tmp_path / "checkpoint-000020").mkdir()  # begun, and cut off
    for url in (str(tmp_path), f"file://{tmp_path}", str(tmp_path / "checkpoint-000012")):
        kept = checkpoints.read(url)
        assert (kept.checkpoint.run, kept.checkpoint.step) == ("r-1", 12)
    listed(tmp_path / "checkpoint-1000000", checkpoint={"run": "r-1", "step": "1000000"})
    assert checkpoints.read(str(tmp_path)).checkpoint.step == 1000000
    checkpoints.forget_old(str(tmp_path), 2)
    left = {"checkpoint-000012", "checkpoint-000020", "checkpoint-1000000"}
    assert {p.name for p in tmp_path.iterdir()} == left, (
        "whole ones count, the cut off one does not"
    )


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "checkpoint.json").unlink(), "has no checkpoint.json"),
        (lambda f: (f / "checkpoint.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "checkpoint.json").write_text("[]"), "cannot be read"),
        (lambda f: (f / "graph").write_bytes(b"gra"), "has 3 bytes: expected 5"),
        (lambda f: (f / "graph").unlink(), "lacks graph"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path, damage: Any, says: str) -> None:
    folder = listed(tmp_path / "checkpoint-000004")
    damage(folder)
    with pytest.raises(CheckpointError, match=says):
        checkpoints.read(str(folder))


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="version 7: this shoal reads version 1"):
        checkpoints.read(str(listed(tmp_path / "checkpoint-000004", version=7)))


# ---------------------------------------------------------------- the whole of it


NET = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Embedding(256, 8)
        self.mix = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 256, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x, y):
        found = self.outer(self.mix(self.inner(x)).tanh())
        return F.cross_entropy(found.flatten(0, 1), y.flatten())

def net():
    return Net()
"""


@pytest.fixture
def work(tmp_path: Path) -> Job:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "text.bin").write_bytes(bytes(range(256)) * 40)
    return Job(
        model="net.py:net",
        data={"source": "text.bin", "length": 8},
        train=JOB["train"] | {"steps": 8, "eval_every": 0},
        output={"to": f"file://{tmp_path}/out", "every": 4},
        folder=tmp_path,
    )


def losses(run: shoal.Run) -> dict[int, float]:
    return {e.step.step: e.step.outcome.loss for e in run.watch() if e.HasField("step")}


@pytest.mark.process
def test_a_run_goes_on_from_a_checkpoint_on_disk(work: Job, tmp_path: Path) -> None:
    """In another network, which has never heard of the run; the oracle is the longer run."""
    short = replace(work, train=replace(work.train, steps=4))
    with LocalCluster(peers=1) as cluster, shoal.connect(cluster.address) as client:
        whole = client.submit(work)
        with pytest.raises(Refused, match=f"run {whole.id} has not ended, and with changes"):
            client.go_on(whole.id, ["train.steps=9"])
        whole.wait()
        wanted, weights = losses(whole), whole.weights()
        first = client.submit(short)
        first.wait()
        then = client.go_on(first.id, ["train.steps=6"])
        then.wait()
        assert losses(then) == {k: wanted[k] for k in (4, 5)}
        first_weights = first.weights()
    folder = tmp_path / "out" / first.id / "checkpoint-000004"
    found = load_file(folder / "model.safetensors")
    assert found.keys() == first_weights.keys() == weights.keys()
    assert all(torch.equal(found[name], first_weights[name]) for name in found)
    with LocalCluster(peers=1) as cluster, shoal.connect(cluster.address) as client:
        last = client.go_on(str(folder), ["train.steps=8"])
        last.wait()
        assert losses(last) == {k: wanted[k] for k in (4, 5, 6, 7)}
        again = last.weights()
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        with pytest.raises(SettingsError, match="`seed` is 3, and the run had 0"):
            client.go_on(str(folder), ["train.steps=8", "seed=3"])
        (tmp_path / "text.bin").write_bytes(bytes(256))
        with pytest.raises(SettingsError, match="other data than the checkpoint"):
            client.go_on(str(folder), ["train.steps=8"])


@pytest.mark.slow
@pytest.mark.process
def test_replicas_that_train_apart_go_on_from_a_folder_and_may_be_more(
    work: Job, tmp_path: Path
) -> None:
    apart = replace(work, sync={"kind": "local", "every": 2}, plan={"replicas": 2})
    with LocalCluster(peers=2) as cluster, shoal.connect(cluster.address) as client:
        run = client.submit(apart)
        run.wait()
    folder = tmp_path / "out" / run.id
    with LocalCluster(peers=4) as cluster, shoal.connect(cluster.address) as client:
        last = client.go_on(str(folder), ["train.steps=12", "plan.replicas=4"])
        last.wait()
        done = [e.round_done for e in last.watch() if e.HasField("round_done")]
        assert [(d.round, d.microbatches) for d in done] == [(4, 40), (5, 48)]
        assert all(w.isfinite().all() for w in last.weights().values())
    assert (tmp_path / "out" / last.id / "checkpoint-000012" / "model.safetensors").exists()
