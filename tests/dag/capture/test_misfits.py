"""Widths that do not fit, and input of another dtype: said as that, not as a line to rewrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.dag.capture.capture import CaptureError, capture


class Layers(nn.Module):
    """Layers of which some do not fit each other."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.first, self.second = nn.Linear(8, 10), nn.Linear(12, 4)
        self.maps, self.norm, self.words = nn.Conv2d(3, 4, 3), nn.LayerNorm(9), nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).float().square().mean()


def said(run: Callable[[Any, Tensor], Tensor], x: Tensor) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(Layers(run), {"x": x})
    return str(caught.value)


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (lambda s, x: s.second(s.first(x)), (4, 8)),
        (lambda s, x: s.first(x) + torch.ones(7), (4, 8)),
        (lambda s, x: x @ torch.ones(7, 3), (4, 8)),
        (lambda s, x: s.norm(x), (4, 8)),
        (lambda s, x: s.maps(x), (4, 1, 8, 8)),
        (lambda s, x: s.first(x).view(-1, 7), (4, 8)),
    ],
)
def test_a_wrong_width_is_said_as_one(run: Any, shape: tuple[int, ...]) -> None:
    text = said(run, torch.randn(*shape))
    assert "do not fit: look at the widths" in text
    assert "torch operations" not in text


@pytest.mark.parametrize("run", [lambda s, x: s.first(x), lambda s, x: s.maps(x)])
def test_text_for_a_model_of_numbers_names_the_kind_of_data(run: Any) -> None:
    text = said(run, torch.zeros(4, 8, dtype=torch.int64))
    assert "is data.kind the model's? without data.kind a batch is text" in text
    assert "torch operations" not in text


def test_numbers_for_a_model_of_text_name_it_too() -> None:
    assert "data.kind" in said(lambda s, x: s.words(x), torch.randn(4, 8))


def test_any_other_fault_is_said_as_before() -> None:
    text = said(lambda s, x: s.nothing(x), torch.randn(4, 8))
    assert "AttributeError" in text
    assert "torch operations" in text
    assert "data.kind" not in text
