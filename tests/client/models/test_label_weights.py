"""A Hugging Face model on arrays makes its loss of the labels itself; its weight is what that is a
mean over. The oracle is the loss of the whole batch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.client.models.losses import with_own_loss, with_weight
from shoal.dag.capture.capture import CaptureError, capture


class Output(OrderedDict[str, Any]):
    """As transformers returns it: by name and as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class Labelled(nn.Module):
    """Makes its loss of logits and labels as a class of transformers does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(5, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.head(x)  # (B, T, 4)
        flat, wanted = logits.flatten(0, 1), labels.flatten()
        match self.how:
            case "shifted":
                flat, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                loss = F.cross_entropy(flat, wanted, ignore_index=-100)
            case "module":
                loss = nn.CrossEntropyLoss(label_smoothing=0.1)(flat, wanted)
            case "class weights":
                loss = F.cross_entropy(flat, wanted, weight=torch.arange(1.0, 5.0))
            case "nll":
                loss = 0.5 * F.nll_loss(flat.log_softmax(-1), wanted)
            case "regression":
                loss = F.mse_loss(logits[..., 0], labels.float())
            case _:
                loss = F.cross_entropy(flat, wanted) + F.cross_entropy(-flat, wanted)
        return Output(loss=loss, logits=logits)


@settings(max_examples=30, deadline=None)
@given(
    how=st.sampled_from(["shifted", "module", "class weights", "nll"]), seed=st.integers(0, 10**6)
)
def test_microbatches_are_weighed_by_the_labels_that_their_mean_is_over(
    how: str, seed: int
) -> None:
    torch.manual_seed(seed)
    module = Labelled(how)
    x, labels = torch.randn(8, 6, 5), torch.randint(0, 4, (8, 6))
    labels[torch.rand(8, 6) < torch.rand(8, 1)] = -100  # one has many labels, another few or none
    labels[0, 1] = 2
    whole = module(x=x, labels=labels).loss
    module.__class__ = with_weight(Labelled)
    total, weights = torch.zeros(()), torch.zeros(())
    for start in range(0, 8, 2):
        part = module(x=x[start : start + 2], labels=labels[start : start + 2])
        if part["weight"]:
            total, weights = total + part["weight"] * part["loss"], weights + part["weight"]
    torch.testing.assert_close(total / weights, whole)


@pytest.mark.parametrize("how", ["two means", "regression"])
def test_what_is_no_single_mean_over_labels_has_no_weight(how: str) -> None:
    module = Labelled(how)
    module.__class__ = with_weight(Labelled)
    made = module(x=torch.randn(2, 6, 5), labels=torch.zeros(2, 6, dtype=torch.long))
    assert "weight" not in made


class Caching(nn.Module):
    """A model that keeps what it is asked to keep, and says so."""

    def forward(self, x: Tensor, use_cache: bool | None = None) -> dict[str, Any]:
        return {"loss": x.mean(), "kept": use_cache}


@pytest.mark.parametrize("library", ["transformers.models.any", "mine"])
def test_a_model_of_transformers_keeps_no_cache_unless_it_is_asked_to(library: str) -> None:
    kind = type("Caching", (Caching,), {"__module__": library})
    for wrapped in (with_weight(kind), with_own_loss(kind, lambda made, batch: made)):
        module = wrapped()
        expected = False if library.startswith("transformers.") else None
        assert module(x=torch.ones(2))["kept"] is expected
        assert module(x=torch.ones(2), use_cache=True)["kept"] is True


class Unflattened(Labelled):
    """The labels of a batch are not flat as the logits are."""

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        return Output(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels))


def test_what_fails_below_the_class_is_at_the_users_line() -> None:
    module = Unflattened("wrong")
    module.__class__ = with_weight(Unflattened)
    with pytest.raises(CaptureError, match=r"test_label_weights.py:\d+: return Output\(loss="):
        capture(module, {"x": torch.randn(3, 2, 5), "labels": torch.zeros(3, 2, dtype=torch.long)})
