"""Weights of a run in files: under the user's names, and in the place of weights alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.client.files.records import record_of, write_run
from shoal.client.models.state_dicts import load_named
from shoal.client.runs import weights
from shoal.client.runs.run import Run
from shoal.job import Job
from shoal.tests.client.small_models import Tied


def test_weights_come_back_under_the_users_names(tmp_path: Path) -> None:
    first, second = Tied(), Tied()
    state = dict(first.state_dict())
    path = weights.write(state, tmp_path / "r-1", None, "safetensors")
    assert path == tmp_path / "r-1" / "model.safetensors"
    second.load_state_dict(load_file(path))  # strict: every name is there
    assert torch.equal(second.a.weight, first.a.weight)
    del state["b.weight"]  # one name of a tied tensor is enough
    third = Tied()
    load_named(third, state)
    assert torch.equal(third.b.weight, first.a.weight)


def test_weights_take_the_place_of_weights_alone(tmp_path: Path) -> None:
    state, job = dict(Tied().state_dict()), tmp_path / "job.toml"
    job.write_text("version = 1\n")
    with pytest.raises(weights.ExportError, match=r"job.toml is there, and by its name no weights"):
        weights.write(state, tmp_path / "r-1", job, "safetensors")
    assert job.read_text() == "version = 1\n"
    for _ in range(2):
        weights.write(state, tmp_path / "r-1", tmp_path / "a.safetensors", "safetensors")


@pytest.mark.parametrize("format", ["hf", "peft", "safetensors"])
@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"factory": "hf:base"}, "base"),
        ({"factory": "hf:base"}, "base/of-mine"),
        ({"factory": "hf:base"}, "link"),
        ({"factory": "a:b", "weights": "base/model.safetensors"}, "base"),
        ({"factory": "a:b", "weights": "base/model.safetensors"}, "base/model.safetensors"),
    ],
)
def test_an_export_never_takes_the_place_of_what_the_run_began_with(
    tmp_path: Path, model: dict[str, Any], path: str, format: Any
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).write_text("as it was")
    (tmp_path / "link").symlink_to(base)
    own = replace(Job(model=model, steps=1), folder=tmp_path)
    write_run(tmp_path / "runs/r-1", record_of("r-1", own, "runs/", "", 0))
    unused: Any = None
    with pytest.raises(weights.ExportError, match=f"is in {base}.*expected another folder"):
        Run(unused, "r-1", tmp_path / "runs").export(tmp_path / path, format)
    assert {p.read_text() for p in base.iterdir()} == {"as it was"}


def test_an_hf_export_needs_what_was_kept_at_submission(tmp_path: Path) -> None:
    with pytest.raises(weights.ExportError, match="where the run was submitted"):
        weights.write({}, tmp_path, None, "hf")
