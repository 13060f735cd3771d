"""The hospitals of examples/hospitals: who has what, and a run over real daemons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shoal.client import connect
from shoal.examples.hospitals.hospitals import HOSPITALS, diagnosis, write
from shoal.job import Job
from shoal.sim.processes import LocalCluster

JOB = Path(__file__).resolve().parents[2] / "examples/hospitals/job.toml"


def test_each_case_is_in_one_hospital_and_they_differ(tmp_path: Path) -> None:
    found = [dict(np.load(own / "cases.npz")) for own in write(tmp_path)]
    assert sum(len(f["y"]) for f in found) == 569
    assert len(np.unique(np.concatenate([f["x"] for f in found]), axis=0)) == 569
    benign = [f["y"].mean() for f in found]
    assert max(benign) - min(benign) > 0.5
    loss = diagnosis()(torch.from_numpy(found[0]["x"]), torch.from_numpy(found[0]["y"]))["loss"]
    assert torch.isfinite(loss)


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
    model = diagnosis()
    model.load_state_dict(load_file(weights))
    right = total = 0
    for own in folders:
        with np.load(own / "cases.npz") as cases:
            x, y = torch.from_numpy(cases["x"]), torch.from_numpy(cases["y"])
            assert not any(row.tobytes() in held for row in cases["x"]), "a case is at the broker"
        right += int((model.layers(torch.log1p(x)).argmax(1) == y).sum())
        total += len(y)
    assert right / total > 0.8, "63 % are benign"
