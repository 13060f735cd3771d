"""benchmarks/people/zoo.py: families of language models by a plain loop and by what is captured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.benchmarks.people import compared
from shoal.benchmarks.people.compared import Row
from shoal.benchmarks.people.models_page import page
from shoal.benchmarks.people.tasks import OTHERS, Problem
from shoal.benchmarks.people.zoo import FAMILIES, figures, listed, others, run

SAMPLE = ("llama", "gpt2", "mamba", "bloom", "mixtral", "bart")
"""Rotary and learned positions, a scan, a backward of its own, experts, a decoder of two halves."""


def test_shares_are_of_what_the_library_itself_builds() -> None:
    rows = [Row("a", "equal"), Row("b", "wrong"), Row("c", "refused"), Row("d", "not built")]
    found = {f.name: f.value for f in figures([*rows, Row("e", "equal")])}
    assert found == {"zoo_families": 4, "zoo_captured_share": 0.5, "zoo_wrong": 1}


def test_the_page_has_a_line_for_each_family_and_no_folder_of_this_machine() -> None:
    why = "CaptureError: /home/me/lib/modeling_b.py:3: x | y is not possible: this model family …"
    rows = [Row("b", "refused", why), Row("a", "equal"), Row("c", "not built")]
    others = [Row("t/e", "equal"), Row("t/f", "error"), Row("t/g", "equal"), Row("t/h", "wrong")]
    assert page(rows, others, [], "5").splitlines()[-1] == "| t | e, g | f | h |"
    text = page(rows, [], ["d"], "5")
    assert text.splitlines()[-2:] == [
        "| a | yes | yes |  |",
        r"| b | no |  | modeling\_b.py:3: x \| y is not possible |",
    ]
    assert "Not tried yet: d." in text


def test_the_list_names_each_family_once() -> None:
    names = listed()
    assert len(names) == len(set(names)) > 150
    assert not set(names) & set(json.loads(FAMILIES.read_text())["not built"])


class Loss(nn.Module):
    """A model whose loss is that of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(128, 4)
        self.head = nn.Linear(4, 128)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.rows(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss=loss)


class Output(dict):  # type: ignore[type-arg]
    """A mapping with a loss, as the library's outputs are."""

    @property
    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self["loss"]
        return found


@pytest.mark.parametrize("by", [0.0, 3e-3])
def test_other_weights_are_seen(by: float) -> None:
    torch.manual_seed(0)
    model = Loss()
    problem = Problem("causal-lm", None)
    captured = compared.capture(model, problem.batch(0))
    tensors = {n: t.clone() for n, t in captured.tensors.items()}
    tensors["head.bias"][5] += by
    row = compared._trained("loss", model, replace(captured, tensors=tensors), problem)
    assert row.status == ("wrong" if by else "equal"), row


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_family_of_each_other_task_is_captured_and_equal_to_the_plain_loop() -> None:
    names = [f"{task}/{families[-1]}" for task, families in OTHERS.items()]
    assert set(names) <= set(others())
    assert {name: run(name).why for name in names} == dict.fromkeys(names, "")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_families_is_captured_and_equal_to_the_plain_loop() -> None:
    rows = {family: run(family) for family in SAMPLE}
    assert {family: row.why for family, row in rows.items()} == dict.fromkeys(SAMPLE, "")
    assert all(row.status == "equal" for row in rows.values())
    assert all(row.loss_difference < 1e-4 for row in rows.values())
