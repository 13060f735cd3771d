"""Folders of transformers whose files have other names than the model's parameters, and parameters
that begin fresh whatever files have. The oracle is what `from_pretrained` makes of the folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.client import submission
from shoal.client.files.weight_files import WeightFilesError, find
from shoal.client.models import models
from shoal.client.models.factories import ModelError
from shoal.client.models.fitting import FileNames, Wanted, fit
from shoal.client.models.models import fit_options, starting_files
from shoal.client.models.tasks import TASKS
from shoal.job import Job

transformers = pytest.importorskip("transformers")

NARROW = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "image_size": 16}
NARROW |= {"num_attention_heads": 2, "patch_size": 8}
LEVELS = {"depths": [1, 1], "num_heads": [1, 2], "embed_dim": 8, "image_size": 16, "patch_size": 2}
LEVELS |= {"window_size": 4}
STAGES = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "decoder_hidden_size": 8}
STAGES |= {"num_attention_heads": [1] * 4}
BOTH = {"vocab_size": 32, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
BOTH |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0}
BOTH |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 16}
TEXT = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
TEXT |= {"num_attention_heads": 2, "max_position_embeddings": 16}
ARRAYS = {"kind": "arrays", "source": "none"}


def job(folder: Path, task: str = "auto", **model: Any) -> Job:
    args = {"task": task} | model.pop("args", {})
    return Job(model={"factory": f"hf:{folder}", "args": args, **model}, data=ARRAYS, steps=1)


def write(folder: Path, task: str, kind: str, sizes: dict[str, Any]) -> nn.Module:
    """A model that was saved by transformers, with values that nothing draws by itself."""
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model: nn.Module = class_of(task).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.rand(parameter.shape))
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def class_of(task: str) -> Any:
    return getattr(transformers, f"AutoModelFor{TASKS[task].kind}")


def change(folder: Path, names: dict[str, str], **more: Tensor) -> None:
    """Write the files of a folder anew with other names, and tensors besides."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors | more, path, metadata={"format": "pt"})


def unequal(ours: nn.Module, theirs: nn.Module) -> list[str]:
    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys()
    return [name for name in b if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize(
    ("task", "kind", "sizes"),
    [
        ("image-classification", "vit", NARROW),
        ("image-classification", "beit", NARROW | {"use_relative_position_bias": True}),
        ("image-classification", "dinov2", NARROW),
        ("image-classification", "ijepa", NARROW),
        ("image-classification", "vit_msn", NARROW),
        ("image-classification", "segformer", STAGES),
        ("image-classification", "swin", LEVELS),
        ("seq2seq-lm", "marian", BOTH),
    ],
)
def test_a_folder_of_save_pretrained_is_the_model_of_from_pretrained(
    tmp_path: Path, task: str, kind: str, sizes: dict[str, Any]
) -> None:
    saved = write(tmp_path, task, kind, sizes)
    theirs = class_of(task).from_pretrained(tmp_path)
    assert not unequal(saved, theirs)
    assert not unequal(models.build(job(tmp_path, task)), theirs)


GAMMA = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


@pytest.mark.parametrize("rename", [{}, GAMMA])
@pytest.mark.parametrize("names", [GAMMA, GAMMA | {"bert.": ""}])
def test_old_names_of_bert_are_its_parameters(
    tmp_path: Path, names: dict[str, str], rename: dict[str, str]
) -> None:
    """Those of a model without its head, too, and by a job that names them itself."""
    write(tmp_path, "masked-lm", "bert", TEXT)
    change(tmp_path, names)
    theirs = class_of("masked-lm").from_pretrained(tmp_path)
    assert not unequal(models.build(job(tmp_path, rename=rename)), theirs)


@pytest.mark.parametrize("by", [0.0, 1.0])
def test_two_names_of_one_parameter_need_one_value(tmp_path: Path, by: float) -> None:
    theirs = write(tmp_path, "masked-lm", "bert", TEXT)
    name = "bert.embeddings.LayerNorm."
    more = {f"{name}gamma": theirs.state_dict()[f"{name}weight"] + by}
    change(tmp_path, {}, **more)
    if by:
        with pytest.raises(WeightFilesError, match=r"LayerNorm\.gamma\" and .* one parameter"):
            models.build(job(tmp_path))
    else:
        assert not unequal(models.build(job(tmp_path)), theirs)


def test_what_transformers_splits_is_refused_with_the_way_out(tmp_path: Path) -> None:
    task, saved = "image-classification", tmp_path / "saved"
    theirs = write(saved, task, "dinov2", NARROW | {"use_swiglu_ffn": True})
    with pytest.raises(WeightFilesError, match=r"joins, splits or turns \(Chunk: .*state_dict\(\)"):
        models.build(job(saved, task))
    own = tmp_path / "own.safetensors"
    save_file(theirs.state_dict(), own)
    assert not unequal(models.build(job(saved, task, weights=str(own))), theirs)


def test_a_tensor_that_is_another_parameter_is_not_found_by_its_own_name(tmp_path: Path) -> None:
    """Renames may go in a circle: what is named `a` in files is `b` of the model, and the other way
    about; one that is turned besides is nobody's."""
    held = {name: torch.rand(2) for name in "abc"}
    save_file(held, tmp_path / "w.safetensors")
    stored = find([str(tmp_path / "w.safetensors")])
    wanted = [Wanted((name,), (2,), torch.float32, True) for name in "abc"]
    circle = FileNames({"a": ["b"], "b": ["a"]}, {"c": "Transpose"})
    found = dict(fit(stored, wanted[:2], renamed=lambda names: circle).tensors())
    assert torch.equal(found["a"], held["b"])
    assert torch.equal(found["b"], held["a"])
    with pytest.raises(WeightFilesError, match=r"1 of its parameters are missing \(c\).*Transpose"):
        fit(stored, wanted, renamed=lambda names: circle)
    by_job = fit(stored, wanted[:1], rename={"a": "c"}, renamed=lambda names: FileNames())
    assert torch.equal(dict(by_job.tensors())["a"], held["c"])


# ---------------------------------------------------------------- fresh


@pytest.mark.parametrize("labels", [2, 5])
def test_what_is_fresh_begins_fresh_whatever_files_have(tmp_path: Path, labels: int) -> None:
    task, saved, bare = "sequence-classification", tmp_path / "saved", tmp_path / "bare"
    write(saved, task, "bert", TEXT).config.save_pretrained(bare)  # type: ignore[union-attr, operator]
    args = {"num_labels": labels}
    given = job(saved, task, fresh=["classifier.*"], args=args)
    theirs = class_of(task).from_pretrained(saved, ignore_mismatched_sizes=True, **args)
    ours, anew = models.build(given), models.build(job(bare, task, args=args))
    heads = {"classifier.weight", "classifier.bias"}
    assert {*unequal(ours, theirs)} - heads == set()
    state = ours.state_dict()
    assert all(torch.equal(state[name], anew.state_dict()[name]) for name in heads)
    assert not torch.equal(state["classifier.weight"], theirs.state_dict()["classifier.weight"])
    said: list[str] = []
    stored = starting_files(given)
    assert stored is not None
    options = fit_options(ours, given, frozenset())
    found = fit(stored, [wanted_of(n, t) for n, t in state.items()], **options, say=said.append)
    assert found.entries.keys() == state.keys() - heads
    assert len(said) == 1
    assert said[0].startswith("2 tensors of the files are left out, as model.fresh says")


def wanted_of(name: str, tensor: Tensor) -> Wanted:
    return Wanted((name,), tuple(tensor.shape), tensor.dtype, True)


@pytest.mark.parametrize(
    ("fresh", "says"),
    [
        (["clasifier.*"], r'has "clasifier\.\*", which matches no parameter'),
        (["cls.*", "cls.predictions.decoder.weight"], r'decoder\.weight" is tied to "bert\.embed'),
    ],
)
def test_a_glob_that_makes_nothing_fresh_is_refused(
    tmp_path: Path, fresh: list[str], says: str
) -> None:
    write(tmp_path, "masked-lm", "bert", TEXT)
    with pytest.raises(ModelError, match=says):
        models.build(job(tmp_path, fresh=fresh))


def test_a_tied_table_that_a_glob_names_by_its_other_name_stays_and_that_is_said(
    tmp_path: Path,
) -> None:
    theirs = write(tmp_path, "masked-lm", "bert", TEXT)
    ours = models.build(job(tmp_path, fresh=["cls.*"]))
    assert all(name.startswith("cls.") for name in unequal(ours, theirs))
    assert "cls.predictions.bias" in unequal(ours, theirs)
    names, said = ("table", "cls.table"), list[str]()
    save_file({"table": torch.rand(2)}, tmp_path / "w.safetensors")
    stored = find([str(tmp_path / "w.safetensors")])
    one = [Wanted(names, (2,), torch.float32, True)]
    assert fit(stored, one, fresh=["cls.*"], say=said.append).entries.keys() == {"table"}
    assert said == [
        '"cls.table" is "table", which model.fresh does not name: it begins as the files have it'
    ]


def test_an_adapter_may_be_over_fixed_positions_that_no_file_has(tmp_path: Path) -> None:
    """Whoever loads the base makes the same ones."""
    pytest.importorskip("peft")
    write(tmp_path, "seq2seq-lm", "marian", BOTH)
    lora = {"r": 2, "target_modules": ["q_proj"]}
    given = job(tmp_path, lora=lora)
    given = replace(given, output=replace(given.output, format="peft"))
    found = models.outline(given)
    module = models.build(given)
    theirs = class_of("seq2seq-lm").from_pretrained(tmp_path).state_dict()
    positions = {f"model.{half}.embed_positions.weight" for half in ("encoder", "decoder")}
    assert all(torch.equal(module.state_dict()[name], theirs[name]) for name in positions)
    graph: Any = SimpleNamespace(parameters=[], buffers=[], operators=[])
    for name, parameter in module.named_parameters():
        spec = SimpleNamespace(sizes=tuple(parameter.shape), dtype="float32")
        graph.parameters.append(
            SimpleNamespace(
                name=models.plain_name(module)(name),
                tied=(),
                spec=spec,
                trainable=parameter.requires_grad,
            )
        )
    graph.operators = [SimpleNamespace(reads=[f"param:{p.name}" for p in graph.parameters])]
    files = submission._pretrained(given, starting_files(given), found, graph, print)
    assert files is not None
    assert positions == {p.name for p in graph.parameters if not p.trainable} - {*files.entries}
