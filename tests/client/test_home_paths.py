"""A "~" at the begin of a path of a job is the home: no shell reads job.toml."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shoal.client.errors import RecordError
from shoal.client.files.records import local_folder
from shoal.client.job_data import read_data
from shoal.client.models import models
from shoal.job import Job
from shoal.sim.comparing import compare
from shoal.sim.named_files import mark_of


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_what_a_job_names_is_found_there(home: Path) -> None:
    (home / "m.py").write_text("from torch import nn\ndef f():\n    return nn.Linear(2, 1)\n")
    np.savez(home / "d.npz", x=np.ones((8, 2), np.float32), y=np.ones(8, np.float32))
    weights = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    save_file(weights, home / "w.safetensors")
    job = Job(
        model={"factory": "~/m.py:f", "weights": "~/w.safetensors"},
        data={"kind": "arrays", "source": "~/d.npz"},
        output={"to": "~/runs"},
        steps=1,
        folder=home.parent,
    )
    state = models.build(job).state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    assert read_data(job, home.parent / "out", print, None).manifest.total == 8
    assert local_folder(job.output.to) == home / "runs"
    before = mark_of(job)
    np.savez(home / "d.npz", x=np.ones((9, 2), np.float32), y=np.ones(9, np.float32))
    assert mark_of(job) != before


def test_runs_that_are_compared_are_found_there(home: Path) -> None:
    (home / "r").mkdir()
    with pytest.raises(RecordError, match=r"home/r has no run\.json"):
        compare("~/r", "~/r")
