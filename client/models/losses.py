"""The loss of a job's model, where the model does not return it itself: classes whose forward takes
a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...job import Job
from ...job.tables import OF_PACKING
from .factories import ModelError, function_of

__all__ = ["check_causal", "loss_function", "with_loss", "with_own_loss", "with_weight"]


def loss_function(job: Job) -> Callable[..., Any] | None:
    """What computes the loss from the module's output and the batch; None: the module itself."""
    if job.model.loss == "forward":
        return None
    return function_of(job.model.loss, job.folder, "model.loss")


def check_causal(module: nn.Module) -> None:
    """Raise ModelError for a model of transformers of a family in which a token sees those behind
    it: what it is to predict would be among what it gets."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    config = getattr(module, "config", None)
    if getattr(config, "model_type", "") in (*MASKED, "bert-generation") and not getattr(
        config, "is_decoder", False
    ):
        raise ModelError(
            f"in the model ({type(module).__name__}) a token sees those behind it, and it would be "
            "trained to predict them: expected a causal language model (of a family that is both, "
            "args = { is_decoder = true }), or arrays with labels"
        )


def with_loss(base: type[nn.Module], inputs: str, targets: str) -> type[nn.Module]:
    """A Hugging Face class whose forward takes a microbatch of text: mean cross-entropy over the
    targets that are not -100, and their number as weight. Where a batch has `positions` and
    `documents` (B, T), a token attends to those of its own document alone."""

    def forward(self: nn.Module, **batch: Tensor) -> dict[str, Tensor]:
        # The targets are the next tokens already. The model's own `labels=` would shift once more,
        # and its mean would not say how many labels it is over.
        packed = _of_packing(self, batch) if OF_PACKING[0] in batch else {}
        given = {"input_ids": batch[inputs], "use_cache": False} | packed
        logits = base.forward(self, **given).logits  # (B, T, V)
        wanted = batch[targets].flatten()
        count = (wanted != -100).sum()
        total = F.cross_entropy(logits.float().flatten(0, 1), wanted, reduction="sum")
        return {"loss": total / count.clamp(min=1), "weight": count.float()}

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _of_packing(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What makes a model of transformers see each document by itself: position_ids (B, T), and an
    attention_mask (B, 1, T, T) to be added, which it takes as it is."""
    positions, documents = (batch[name] for name in OF_PACKING)
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    same = documents[:, :, None] == documents[:, None, :]
    length = positions.shape[1]
    at = torch.arange(length, device=positions.device)
    seen = same & (at[:, None] >= at[None, :])
    zero = torch.zeros((), dtype=dtype, device=positions.device)
    mask = torch.where(seen, zero, torch.finfo(dtype).min)
    return {"position_ids": positions, "attention_mask": mask[:, None]}


class _Means(TorchFunctionMode):
    """Notes of each cross-entropy that is a mean what it is a mean over."""

    def __init__(self) -> None:
        super().__init__()
        self.over: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            given = signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            labels, weight = given.arguments["target"], given.arguments["weight"]
            if given.arguments["reduction"] == "mean" and not labels.is_floating_point():
                counts = labels != given.arguments["ignore_index"]
                if weight is not None:
                    counts = weight[labels.clamp(min=0)] * counts
                self.over.append(counts.sum())
        return func(*args, **kwargs)


def with_weight(base: type[nn.Module]) -> type[nn.Module]:
    """A Hugging Face class that makes its loss of the labels itself. Where that is one mean over
    the labels that are not ignored, their number is its weight: else each microbatch would count
    the same, however few labels it has."""
    uncached = _uncached(base)

    def forward(self: nn.Module, **batch: Tensor) -> Any:
        with _Means() as means:
            output = base.forward(self, **(uncached | batch))
        loss = getattr(output, "loss", None)
        if len(means.over) != 1 or loss is None or getattr(output, "weight", None) is not None:
            return output
        numbers = {k: v for k, v in output.items() if isinstance(v, Tensor) and v.dim() == 0}
        return numbers | {"loss": loss, "weight": means.over[0].float()}

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _uncached(base: type[nn.Module]) -> dict[str, Any]:
    """What keeps a model of transformers from filling a cache for words to come: families differ in
    whether they do so in train mode, and many compute otherwise where they do."""
    theirs = any(c.__module__.startswith("transformers.") for c in base.__mro__)
    takes = theirs and "use_cache" in signature(base.forward).parameters
    return {"use_cache": False} if takes else {}


def with_own_loss(base: type[nn.Module], loss: Callable[..., Any]) -> type[nn.Module]:
    """A class whose forward takes a microbatch, gives the model what it takes of that, and makes
    the loss of both."""
    takes = signature(base.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    uncached = _uncached(base)

    def forward(self: nn.Module, **batch: Tensor) -> Any:
        given = {k: v for k, v in batch.items() if takes_all or k in takes}
        return loss(base.forward(self, **(uncached | given)), batch)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
