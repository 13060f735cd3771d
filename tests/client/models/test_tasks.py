"""What a folder of transformers becomes (`args.task`), and what it learns of text. The oracles are
transformers' own classes, torch's cross-entropy, and peft's own choice of what is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.client.models import models
from shoal.client.models.division import why_it_depends
from shoal.client.models.factories import ModelError
from shoal.client.models.losses import with_masked_loss
from shoal.client.models.tasks import TASKS, TaskError, task_of
from shoal.client.runs.evaluate import _evaluate
from shoal.client.sidecars import check_base, sidecars_of
from shoal.dag.capture.capture import capture
from shoal.job import Job, SettingsError
from shoal.job.tables import Output

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
BERT = transformers.BertConfig(**SMALL, num_attention_heads=2, max_position_embeddings=16)


def config(kind: str, *architectures: str, **more: Any) -> Any:
    found = transformers.AutoConfig.for_model(kind, **more)
    found.architectures = list(architectures) or None
    return found


@pytest.mark.parametrize("task", list(TASKS.values()), ids=list(TASKS))
def test_each_task_is_a_class_of_transformers_with_a_table_of_its_own(task: Any) -> None:
    auto = getattr(transformers, f"AutoModelFor{task.kind}")
    for family in ("bert", "llama", "bart", "vit"):
        known = transformers.CONFIG_MAPPING[family] in auto._model_mapping
        assert known == bool(task.classes(family)), (task, family)


@pytest.mark.parametrize(
    ("found", "task"),
    [
        (config("bert", "BertForMaskedLM"), "masked-lm"),
        (config("bert", "BertForMaskedLM", is_decoder=True), "causal-lm"),
        (config("bert", "BertLMHeadModel"), "causal-lm"),
        (config("bert", "BertForSequenceClassification"), "sequence-classification"),
        (config("bert", "Mine", "BertForTokenClassification"), "token-classification"),
        (config("bart", "BartForConditionalGeneration"), "seq2seq-lm"),
        (config("t5", "T5Model"), None),
        (config("llama"), "causal-lm"),
        (config("llama", "LlamaModel"), "causal-lm"),
        (config("llama", "LlamaForSequenceClassification"), "sequence-classification"),
        (config("vit", "ViTModel"), "image-classification"),
        (config("resnet"), "image-classification"),
        (config("bert", "BertModel"), None),
        (config("bert"), None),
        (config("sam"), None),
    ],
    ids=lambda v: getattr(v, "model_type", v),
)
def test_auto_is_the_task_of_the_class_that_wrote_the_folder(found: Any, task: str | None) -> None:
    if task is None:
        with pytest.raises(TaskError, match=r"of which no task is known: expected"):
            task_of(found)
    else:
        assert task_of(found).name == task


def test_a_task_that_nobody_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(TaskError, match=r'expected "auto", .*did you mean "masked-lm"'):
        task_of(config("bert"), "masked_lm")
    with pytest.raises(TaskError, match=r'family vit has classes for "image-classification"'):
        task_of(config("vit"), "masked-lm")


def job(folder: Path, data: dict[str, Any], **args: Any) -> Job:
    return Job(model={"factory": f"hf:{folder}", "args": args}, data=data, steps=1)


@pytest.mark.parametrize("args", [{}, {"task": "image-classification"}])
def test_of_several_classes_for_a_task_a_folder_says_which_it_is(
    tmp_path: Path, args: dict[str, Any]
) -> None:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    transformers.DeiTConfig(**small, intermediate_size=8).save_pretrained(tmp_path)
    arrays = {"kind": "arrays", "inputs": "pixel_values", "targets": "labels", "source": "x.npz"}
    with pytest.raises(ModelError, match=r"no architectures.*\[\"DeiTForImageClassification\"\]"):
        models.build(job(tmp_path, arrays, **args))
    name = "DeiTForImageClassificationWithTeacher"
    found = models.build(job(tmp_path, arrays, **args, architectures=[name]))
    assert name in [kind.__name__ for kind in type(found).__mro__]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of BERT for masked tokens, with a tokenizer of single letters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    home = tmp_path_factory.mktemp("bert")
    transformers.BertForMaskedLM(BERT).save_pretrained(home)
    words = Tokenizer(WordLevel({"?": 0, "M": 1, "a": 2, "b": 3, "c": 4}, unk_token="?"))
    words.pre_tokenizer = Split("", "isolated")
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=words, mask_token="M")
    own.save_pretrained(home)
    return home


TEXT = {"kind": "text", "length": 8}
ARRAYS = {"kind": "arrays", "source": "none", "inputs": "input_ids", "targets": "labels"}


def test_a_folder_becomes_the_class_of_its_task(folder: Path) -> None:
    for args, kind in (
        ({}, "BertForMaskedLM"),
        ({"task": "sequence-classification", "num_labels": 7}, "BertForSequenceClassification"),
        ({"task": "causal-lm", "is_decoder": True}, "BertLMHeadModel"),
    ):
        found = models.outline(job(folder, ARRAYS, **args)).module
        assert type(found).__name__ == kind
        assert getattr(found, "num_labels", 7) in (2, 7)
    for args, said in (
        ({"task": "vision"}, "model.args.task"),
        ({"task": 1}, "model.args.task"),
        ({"mlm_probability": 0.3}, "changes nothing where the task is masked-lm, data.kind"),
    ):
        with pytest.raises(ModelError, match=said):
            models.outline(job(folder, ARRAYS, **args))


class Seen(nn.Module):
    """A model that notes what it sees, and says the same of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 50)
        self.seen: list[Tensor] = []

    def forward(self, input_ids: Tensor) -> Any:
        self.seen.append(input_ids)
        logits = self.words(input_ids)
        return transformers.modeling_outputs.MaskedLMOutput(logits=logits)


def test_masked_tokens_are_drawn_as_berts_and_alone_are_learned() -> None:
    torch.manual_seed(0)
    model, ids = Seen(), torch.full((200, 500), 7)
    ids[:, :4] = 3
    model.__class__ = with_masked_loss(Seen, "x", share=0.3, mask=49, words=40, special=[3, 5])
    found = model(x=ids, y=ids)
    assert bool((model.seen[0][:, :4] == 3).all())
    ids, model.seen = ids[:, 4:], [model.seen[0][:, 4:]]
    (seen,), count = model.seen, float(found["weight"])
    share = {"asked": count / ids.numel(), "mask": float((seen == 49).sum()) / count}
    share["other"] = float(((seen != 7) & (seen != 49)).sum()) / count
    assert share["asked"] == pytest.approx(0.3, abs=0.005)
    assert share["mask"] == pytest.approx(0.8, abs=0.01)
    assert share["other"] == pytest.approx(0.1 * 39 / 40, abs=0.006)
    others = seen[(seen != 7) & (seen != 49)].unique()
    assert sorted(others.tolist()) == [n for n in range(40) if n != 7]
    # Of the loss: each place that is asked is one of three kinds, and is to be 7.
    rows = model.words.weight.detach()
    of = [float(F.cross_entropy(rows[v][None], torch.tensor([7]))) for v in range(50)]
    kept = count - float((seen != 7).sum())
    total = sum(of[v] for v in seen[seen != 7].tolist()) + kept * of[7]
    assert float(found["loss"].detach()) == pytest.approx(total / count, rel=1e-4)


def test_text_is_masked_by_the_tokenizer_of_the_folder(folder: Path) -> None:
    given = job(folder, TEXT, mlm_probability=0.5)
    module = models.build(given)
    with models.ready(module, given):
        example = {"x": torch.full((2, 8), 3), "y": torch.full((2, 8), 3)}
        graph = capture(module, example).graph
        torch.manual_seed(3)
        module.eval()
        loss = module(**example)
    assert sum(op.target.startswith("shoal.rand.") for op in graph.operators) == 3
    assert 1 <= float(loss["weight"]) <= 16
    for data, said in (
        (TEXT | {"tokenizer": "bytes"}, "whose bytes no tokenizer masks"),
        ({"kind": "chat", "source": "a.jsonl"}, 'data.kind is "chat"'),
    ):
        with pytest.raises(ModelError, match=said), models.ready(module, job(folder, data)):
            pass
    module.config.vocab_size = 1
    with pytest.raises(ModelError, match="is the id 1"), models.ready(module, given):
        pass
    wrong = job(folder, TEXT, mlm_probability=2)
    with pytest.raises(ModelError, match="mlm_probability"), models.ready(module, wrong):
        pass


class Rows:
    """Held-out text of one letter."""

    def held_out(self, number: int, samples: int) -> dict[str, Tensor]:
        return dict.fromkeys(("x", "y"), torch.full((4, 8), 2 + number))

    def batch(self, step: int, first: int, samples: int) -> dict[str, Tensor]:
        return dict.fromkeys(("x", "y"), torch.full((samples, 8), 2))


def test_an_evaluation_here_draws_the_same_masks_each_time(folder: Path) -> None:
    given = job(folder, TEXT)
    module, rows = models.build(given), cast(Any, Rows())
    torch.manual_seed(5)
    first = _evaluate(module, given, rows, 2)
    assert _evaluate(module, given, rows, 2) == first
    assert first["weight"] >= 1


def test_masks_do_not_keep_a_batch_from_being_divided(folder: Path) -> None:
    given = job(folder, TEXT)
    module, rows = models.build(given), cast(Any, Rows())
    with models.ready(module, given):
        graph = capture(module, rows.batch(0, 0, 2)).graph
    assert why_it_depends(module, given, graph, rows) == ""


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BartForConditionalGeneration"])
def test_text_is_no_data_for_a_class_that_wants_labels(kind: str) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    own = BERT if kind.startswith("Bert") else transformers.BartConfig(**sizes)
    module = getattr(transformers, kind)(own)
    live = Job(model=module, data={"kind": "text", "length": 8}, steps=1)
    with pytest.raises(ModelError, match="which wants labels"), models.ready(module, live):
        pass


def test_an_export_names_the_class_that_was_trained(folder: Path, tmp_path: Path) -> None:
    given = job(folder, ARRAYS, task="token-classification", num_labels=5)
    module = models.outline(given).module
    files = {path.name: path for path in sidecars_of(module, given, tmp_path / "sidecars")}
    kept = json.loads(files["config.json"].read_text())
    assert (kept["architectures"], len(kept["id2label"])) == (["BertForTokenClassification"], 5)
    assert (
        task_of(transformers.AutoConfig.from_pretrained(tmp_path / "sidecars")).name
        == given.model.args["task"]
    )
    assert module.config.architectures == ["BertForMaskedLM"]  # type: ignore[union-attr]


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "causal-lm"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_trains_the_head_that_peft_trains(folder: Path, task: str) -> None:
    peft = pytest.importorskip("peft")
    lora = {"r": 2, "target_modules": ["query"]}
    table = {"factory": f"hf:{folder}", "args": {"task": task}, "lora": lora}
    fresh = ["*pooler*", "classifier.*"] if task.startswith("seq") else ["classifier.*"]
    table |= {"fresh": fresh} if task != "causal-lm" else {}
    ours = models.outline(Job(model=table, data=ARRAYS, steps=1)).module
    plain = getattr(transformers, f"AutoModelFor{TASKS[task].kind}").from_config(BERT)
    theirs = peft.get_peft_model(plain, peft.LoraConfig(task_type=TASKS[task].peft, **lora))
    named = theirs.base_model.model.named_parameters()
    trained = {name for name, parameter in named if parameter.requires_grad}
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == trained
    assert (task != "causal-lm") == any("classifier" in n for n in trained)


def test_an_adapter_over_a_base_that_nobody_would_have_is_refused(folder: Path) -> None:
    def graph(saved: list[str]) -> tuple[Job, Any]:
        given = Job(
            model={
                "factory": f"hf:{folder}",
                "args": {"task": "sequence-classification"},
                "fresh": ["bert.pooler.*", "classifier.*"],
                "lora": {"r": 2, "target_modules": ["query"], "modules_to_save": saved},
            },
            data=ARRAYS,
            output={"format": "peft"},
            steps=1,
        )
        module = models.build(given)
        with models.ready(module, given):
            example = {"input_ids": torch.ones(2, 4).long(), "labels": torch.zeros(2).long()}
            return given, capture(module, example, named=models.plain_name(module)).graph

    lines: list[str] = []
    given, found = graph([])
    known = {
        p.name for p in found.parameters if "pooler" not in p.name and "classifier" not in p.name
    }
    with pytest.raises(
        SettingsError, match=r"bert.pooler.dense.weight, bert.pooler.dense.bias begin"
    ):
        check_base(given, found, known, lines.append)
    check_base(*graph(["pooler"]), known, lines.append)
    assert not lines
    check_base(replace(given, output=Output()), found, known, lines.append)
    assert "bert.pooler.dense.weight, bert.pooler.dense.bias begin fresh and stay so" in lines[0]
