"""Models as users give them: made by a factory or live, copied, frozen, and filled with weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.client.files.weight_files import WeightFilesError
from shoal.client.models import models
from shoal.client.models.state_dicts import load_named
from shoal.client.runs import weights
from shoal.job import Job
from shoal.tests.client.small_models import Tied


def test_weights_that_do_not_fit_change_nothing() -> None:
    module = Tied()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(models.ModelError, match=r"missing \(a.weight"):
        load_named(module, {"c": torch.zeros(1)})
    wrong = {**before, "a.weight": torch.zeros(2, 2)}
    with pytest.raises(models.ModelError, match=r'"a.weight" has shape \(2, 2\)'):
        load_named(module, wrong)
    with pytest.raises(models.ModelError, match=r"on 'meta', which keeps no values"):
        load_named(Tied().to("meta"), before)
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("nofile.py:fn", 'names "nofile.py"'),
        ("net.py:missing", 'has no function "missing"'),
        ("net.py:broken", r"raised ValueError: too wide \(.*net.py, line 2\)"),
        ("net.py:nothing", "returned int: expected a torch.nn.Module"),
        ("no.such.module:fn", "cannot be imported: ModuleNotFoundError"),
        ("bad.py:fn", "cannot be imported: SyntaxError"),
        ("hf:nowhere", 'names "nowhere"'),
        ("hf:.", "there is no config.json"),
    ],
)
def test_a_factory_that_does_not_work_is_named(tmp_path: Path, factory: str, says: str) -> None:
    if factory.startswith("hf:"):
        pytest.importorskip("transformers")
    (tmp_path / "net.py").write_text(
        "def broken():\n    raise ValueError('too wide')\ndef nothing():\n    return 1\n"
    )
    (tmp_path / "bad.py").write_text("def fn(:\n")
    with pytest.raises(models.ModelError, match=says):
        models.build(Job(model=factory, steps=1, folder=tmp_path))


def test_a_factory_is_looked_up_in_the_jobs_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, width in ((here, 1), (there, 2)):
        folder.mkdir()
        code = f"import torch\ndef fn():\n    return torch.nn.Linear({width}, 1)\n"
        (folder / "net.py").write_text(code)
    monkeypatch.chdir(here)
    module = models.build(Job(model="net.py:fn", steps=1, folder=there))
    assert isinstance(module, nn.Linear)
    assert module.in_features == 2


def test_freezing_leaves_a_live_module_as_it_was() -> None:
    module = Tied().eval()
    job = Job(model={"factory": "a:b", "freeze": ["b.*"]}, steps=1)
    with models.ready(module, job):
        assert not module.a.weight.requires_grad  # its other name
        assert module.norm.weight.requires_grad
    assert module.a.weight.requires_grad
    with (
        pytest.raises(models.ModelError, match=r'"c\.\*", which matches no parameter'),
        models.ready(module, Job(model={"factory": "a:b", "freeze": ["c.*"]}, steps=1)),
    ):
        pass


def test_a_copy_is_changed_and_tied_alike_and_the_users_own_is_not() -> None:
    module = nn.ModuleDict({"tied": Tied(), "rnn": nn.LSTM(2, 3)}).eval()
    module["tied"].norm.weight.requires_grad_(False)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    made = models._copied(module, lambda tensor: tensor + 1)
    assert made["tied"].a.weight is made["tied"].b.weight
    assert not made["tied"].norm.weight.requires_grad
    assert not made.training
    assert made["rnn"](torch.zeros(1, 1, 2))[0].shape == (1, 1, 3)
    for name, tensor in made.state_dict().items():
        torch.testing.assert_close(tensor, before[name] + 1)
    with torch.no_grad():
        made["tied"].a.weight.zero_()
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_a_model_on_the_cpu_is_taken_itself_and_one_without_values_is_refused() -> None:
    module = Tied()
    assert models.on_cpu(module) is module
    with pytest.raises(models.ModelError, match=r'"a\.weight" is on the meta device.*to_empty'):
        models.on_cpu(Tied().to("meta"))


def test_starting_weights_come_from_a_file(tmp_path: Path) -> None:
    start = Tied()
    path = weights.write(
        start.state_dict(), tmp_path, tmp_path / "start.safetensors", "safetensors"
    )
    job = Job(
        model={"factory": "a:b", "weights": path.name}, module=Tied(), steps=1, folder=tmp_path
    )
    built = models.build(job)
    assert isinstance(built, Tied)
    assert torch.equal(built.a.weight, start.a.weight)
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    bad = Job(
        model={"factory": "a:b", "weights": "bad.safetensors"},
        module=Tied(),
        steps=1,
        folder=tmp_path,
    )
    with pytest.raises(WeightFilesError, match="no safetensors file"):
        models.build(bad)
