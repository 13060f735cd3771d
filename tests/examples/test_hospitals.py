"""The hospitals of examples/hospitals: who has what, and a run over real daemons."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shoal.client import connect
from shoal.examples.hospitals.hospitals import (
    HOSPITALS,
    diagnosis,
    report,
    right,
    write,
)
from shoal.job import Job
from shoal.peer.data.sources import resolve
from shoal.sim.processes import LocalCluster

HOLDOUT = 0.25
JOB = Path(__file__).resolve().parents[2] / "examples/hospitals/job.toml"


def test_each_case_is_in_one_hospital_and_they_differ(tmp_path: Path) -> None:
    found = [dict(np.load(own / "cases.npz")) for own in write(tmp_path)]
    assert sum(len(f["y"]) for f in found) == 569
    assert len(np.unique(np.concatenate([f["x"] for f in found]), axis=0)) == 569
    benign = [f["y"].mean() for f in found]
    assert max(benign) - min(benign) > 0.5
    loss = diagnosis()(torch.from_numpy(found[0]["x"]), torch.from_numpy(found[0]["y"]))["loss"]
    assert torch.isfinite(loss)


def test_what_is_right_is_counted_over_the_cases_that_were_held_out(tmp_path: Path) -> None:
    """Of a model that calls all benign: as many as are, by hospital. The manifests of the hospitals
    hold out as many."""
    folders, model = write(tmp_path / "cases"), diagnosis()
    with torch.no_grad():
        model.layers[2].weight.zero_()
        model.layers[2].bias.copy_(torch.tensor([0.0, 1.0]))
    save_file(model.state_dict(), tmp_path / "benign.safetensors")
    found = right(tmp_path / "benign.safetensors", tmp_path / "cases")
    assert found.keys() == HOSPITALS.keys()
    for own in folders:
        name, source = own.name, str(own / "cases.npz")
        made, _ = resolve(tmp_path / name, kind="arrays", source=source, holdout=HOLDOUT)
        with np.load(own / "cases.npz") as cases:
            y = cases["y"][made.train :]
        assert found[name] == (y.sum(), len(y))
    lines = report({"a": (1, 2), "b": (3, 3)})
    assert lines == [
        "a: 1 of 2 held-out cases right, 50.0%",
        "b: 3 of 3 held-out cases right, 100.0%",
        "all: 4 of 5 held-out cases right, 80.0%",
    ]


@pytest.mark.slow
def test_hospitals_train_one_model_and_keep_their_cases(tmp_path: Path) -> None:
    folders = write(tmp_path / "cases")
    with LocalCluster(peers=[], threads=1) as cluster, connect(cluster.address) as client:
        for name, own in zip(HOSPITALS, folders, strict=True):
            cluster.join(name, ["--config", str(own / "peer.toml")])
        while len(client.describe().peers) < 3:
            cluster.check()
        job = Job.from_toml(JOB)
        run = client.submit(replace(job, output=replace(job.output, to=str(tmp_path / "runs"))))
        run.wait()
        weights = run.export(tmp_path / "model.safetensors")
        assert cluster.folder is not None
        at_broker = [p for p in (cluster.folder / "broker").rglob("*") if p.is_file()]
        held = b"".join(p.read_bytes() for p in at_broker)
    for own in folders:
        with np.load(own / "cases.npz") as cases:
            assert not any(row.tobytes() in held for row in cases["x"]), "a case is at the broker"
    found = right(weights, tmp_path / "cases")
    print("\n".join(report(found)))
    good, total = (sum(numbers) for numbers in zip(*found.values(), strict=True))
    assert total == 141
    assert good / total > 0.85, "of all cases 63 % are benign"
    told = [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text().splitlines()]
    by = [row["eval_accuracy"] for row in told if "eval_accuracy" in row]
    assert by[-1] > by[0]
