"""Whether samples are treated one by one: what is proven of a graph holds for the module's values.
The oracle is the module itself, on four samples together and on each alone."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.analysis.samples import why_samples_meet
from shoal.dag.capture.capture import capture
from shoal.examples.gpt import gpt

Batch = dict[str, Tensor]


def rows(count: int) -> Batch:
    return {"x": torch.randn(count, 3, 4), "y": torch.randn(count, 3, 4)}


def words(count: int) -> Batch:
    return {name: torch.randint(0, 9, (count, 6)) for name in ("x", "y")}


class Of(nn.Module):
    """A loss of a layer's output and the targets."""

    def __init__(self, loss: Callable[[Tensor, Tensor, nn.Module], object]) -> None:
        super().__init__()
        self.inner, self.norm, self.loss = nn.Linear(4, 4), nn.LayerNorm(4), loss

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.loss(self.norm(self.inner(x)), y, self)


class Language(nn.Module):
    """Labels that are 8 may be ignored."""

    def __init__(self, ignored: int = -100, counts: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.ignored, self.counts = ignored, counts

    def forward(self, x: Tensor, y: Tensor) -> object:
        h = self.words(x)
        q = h.transpose(1, 2).unsqueeze(1).transpose(2, 3)
        h = h + F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        logits = self.head(h)
        if not self.counts:
            return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=self.ignored)
        count = (y != self.ignored).sum()
        total = F.cross_entropy(
            logits.flatten(0, 1), y.flatten(), ignore_index=self.ignored, reduction="sum"
        )
        return {"loss": total / count.clamp(min=1), "weight": count.float()}


class Weighed(Language):
    """The mean that torch takes over labels that are not ignored, and a number of labels."""

    def __init__(self, *, of: str = "y", ignored: int = 8, smooth: float = 0.0) -> None:
        super().__init__(8)
        self.of, self.other, self.smooth = of, ignored, smooth

    def forward(self, x: Tensor, y: Tensor) -> object:
        given, labels = {"x": x.flatten(), "y": y.flatten()}, y.flatten()
        given["y"] = labels
        logits = self.head(self.words(x)).flatten(0, 1)
        loss = F.cross_entropy(logits, labels, ignore_index=8, label_smoothing=self.smooth)
        return {"loss": loss, "weight": (given[self.of] != self.other).sum()}


def _small_gpt() -> nn.Module:
    return gpt(layers=2, width=8, heads=2, length=6, dropout=0.0)


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=9,
    )
    model = transformers.LlamaForCausalLM(config)

    class Trained(type(model)):  # type: ignore[misc]
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = super().forward(input_ids=x, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    model.__class__ = Trained
    return model


ALONE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "mean of squares": (lambda: Of(lambda h, y, m: (h - y).square().mean()), rows),
    "mse": (lambda: Of(lambda h, y, m: F.mse_loss(h, y)), rows),
    "mean of means": (lambda: Of(lambda h, y, m: (h - y).abs().mean((1, 2)).mean()), rows),
    "reshaped": (
        lambda: Of(lambda h, y, m: (h.reshape(-1, 4) @ h.new_ones(4, 2)).view(-1, 6).mean()),
        rows,
    ),
    "sum by the number of samples": (
        lambda: Of(lambda h, y, m: (h - y).square().sum() / h.shape[0]),
        rows,
    ),
    "the batch as weight": (
        lambda: Of(lambda h, y, m: {"loss": (h - y).square().mean(), "weight": h.shape[0]}),
        rows,
    ),
    "a penalty of the weights": (
        lambda: Of(lambda h, y, m: (h * y).mean() + 0.1 * m.inner.weight.square().sum()),
        rows,
    ),
    "labels": (Language, words),
    "counted labels": (lambda: Language(8, counts=True), words),
    "a mean with its number of labels": (Weighed, words),
    "a smooth mean with its number of labels": (lambda: Weighed(smooth=0.2), words),
    "gpt": (_small_gpt, words),
    "llama": (_llama, words),
}

TOGETHER: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], str]] = {
    "sum": (lambda: Of(lambda h, y, m: (h - y).square().sum()), rows, "no mean"),
    "across": (lambda: Of(lambda h, y, m: (h - h.mean(0)).square().mean()), rows, "mean"),
    "softmax over samples": (lambda: Of(lambda h, y, m: h.softmax(0).mean()), rows, "softmax"),
    "compared": (
        lambda: Of(lambda h, y, m: (h.flatten(1) @ y.flatten(1).T).mean()),
        rows,
        "permute|transpose|t of|matmul|mm",
    ),
    "number of the sample": (
        lambda: Of(lambda h, y, m: (h * torch.arange(h.shape[0])[:, None, None]).mean()),
        rows,
        "arange|numbers",
    ),
    "number of samples": (lambda: Of(lambda h, y, m: (h * h.shape[0]).mean()), rows, "how many"),
    "the square of a mean": (lambda: Of(lambda h, y, m: h.mean().square()), rows, "pow|square"),
    "ignored labels": (lambda: Language(8), words, "ignored"),
    "another weight": (
        lambda: Of(lambda h, y, m: {"loss": (h - y).mean(), "weight": (y > 0).sum()}),
        rows,
        "than its weight",
    ),
    "a mean with the number of other labels": (lambda: Weighed(of="x"), words, "ignored"),
    "a mean with what it counts as well": (lambda: Weighed(ignored=7), words, "ignored"),
    "merged the wrong way": (
        lambda: Of(lambda h, y, m: h.transpose(0, 1).reshape(-1, 4).softmax(0).mean()),
        rows,
        "reshape|clone",
    ),
    "batch statistics": (
        lambda: Of(lambda h, y, m: F.batch_norm(h, None, None, training=True).square().mean()),
        rows,
        "batch_norm",
    ),
}


def why(module: nn.Module, batch: Callable[[int], Batch]) -> str:
    ignored = 8 if getattr(module, "ignored", None) == 8 else None
    return why_samples_meet(capture(module, batch(2)).graph, lambda op: ignored is None)


@pytest.mark.parametrize("name", ALONE)
def test_samples_that_are_treated_one_by_one_are_found_to_be(name: str) -> None:
    make, batch = ALONE[name]
    torch.manual_seed(3)
    module = make()
    assert why(module, batch) == ""
    given = batch(4)
    parts = [{k: t[i : i + 1] for k, t in given.items()} for i in range(4)]
    whole = gradients(module, [given])
    for ours, theirs in zip(whole, gradients(module, parts), strict=True):
        torch.testing.assert_close(ours, theirs)


def gradients(module: nn.Module, batches: list[Batch]) -> list[Tensor]:
    """Of Σ weight·loss / Σ weight, which comes first."""
    found = [module(**batch) for batch in batches]
    pairs = [
        (f["loss"], torch.as_tensor(f["weight"], dtype=torch.float32))
        if isinstance(f, dict)
        else (f, torch.ones(()))
        for f in found
    ]
    loss = sum(x * w for x, w in pairs) / sum(w for _, w in pairs)
    return [loss, *torch.autograd.grad(loss, list(module.parameters()))]


@pytest.mark.parametrize("name", TOGETHER)
def test_samples_that_meet_are_found(name: str) -> None:
    make, batch, says = TOGETHER[name]
    found = why(make(), batch)
    assert found
    assert any(word in found for word in says.split("|")), found
