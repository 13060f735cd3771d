"""The loss of a job's model, where the model does not return it itself: classes whose forward takes
a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...job import Job
from ...job.tables import OF_PACKING
from ..chat.naming import tokenizer_of
from ..chat.templates import loaded_tokenizer
from ..chat.texts import has_tokenizer
from .factories import ModelError, function_of
from .tasks import TASKS, task_of_module

__all__ = ["loss_function", "with_own_loss", "with_text_loss", "with_weight"]

MASKED, AS_ANOTHER = 0.8, 0.1
"""Shares of the tokens that are to be found again: those behind the tokenizer's mask, and those in
whose place another one stands (BERT, arXiv 1810.04805, appendix C.2); the others stay."""


def loss_function(job: Job) -> Callable[..., Any] | None:
    """What computes the loss from the module's output and the batch; None: the module itself."""
    if job.model.loss == "forward":
        return None
    return function_of(job.model.loss, job.folder, "model.loss")


def with_text_loss(module: nn.Module, job: Job) -> type[nn.Module]:
    """The class of a Hugging Face model whose forward takes a microbatch of text and learns it as
    the model's task has it: the next tokens, or those that are masked. Raises ModelError for a
    model of another task, and where what it takes is not there."""
    task, data = task_of_module(module), job.data
    if (
        task is not None
        and task.name == "masked-lm"
        and not getattr(_config(module), "is_decoder", 0)
    ):
        return _masked(module, job)
    if task is not None and task.name != "causal-lm":
        raise ModelError(
            f"the model ({type(module).__name__}) is for {task.name}, which wants labels: expected "
            'data.kind = "arrays" with the arguments of its forward, such as inputs = "input_ids" '
            'and targets = "labels"'
        )
    if not data.targets:
        raise ModelError(
            "`data.targets` is empty, and a Hugging Face model is trained on the next "
            'tokens: name them, such as targets = "y", or give a model.loss'
        )
    _check_causal(module)
    return with_loss(type(module), data.inputs, data.targets)


def _check_causal(module: nn.Module) -> None:
    """Raise ModelError for a model of transformers of a family in which a token sees those behind
    it: what it is to predict would be among what it gets."""
    family = getattr(_config(module), "model_type", "")
    sees = family == "bert-generation" or TASKS["masked-lm"].classes(family)
    if sees and not getattr(_config(module), "is_decoder", False):
        raise ModelError(
            f"in the model ({type(module).__name__}) a token sees those behind it, and it would be "
            "trained to predict them: expected a causal language model (of a family that is both, "
            'args = { is_decoder = true }), args = { task = "masked-lm" }, or arrays with labels'
        )


def _config(module: nn.Module) -> Any:
    return getattr(module, "config", None)


def _masked(module: nn.Module, job: Job) -> type[nn.Module]:
    """The class that learns masked tokens, by the mask of the job's tokenizer."""
    share = job.model.args.get("mlm_probability", 0.15)
    if not isinstance(share, float) or not 0 < share < 1:
        raise ModelError(f"`model.args.mlm_probability` is {share!r}: expected a number in (0, 1)")
    if job.data.is_records or (job.data.kind == "text" and not has_tokenizer(job)):
        raise ModelError(
            f"the model ({type(module).__name__}) learns masked tokens of text, and data.kind is "
            f'"{job.data.kind}"'
            + ", whose bytes no tokenizer masks" * (not job.data.is_records)
            + ": expected text or tokens of a tokenizer with a mask, or arrays with labels"
        )
    tokenizer = loaded_tokenizer(tokenizer_of(job))
    if tokenizer.mask_token_id is None:
        raise ModelError(
            f"the model ({type(module).__name__}) learns masked tokens, and its tokenizer has no "
            "mask: expected one with a mask_token, or arrays with labels"
        )
    mask, known = tokenizer.mask_token_id, _config(module).vocab_size
    if mask >= known:
        raise ModelError(
            f"the mask of the tokenizer is the id {mask}, and the model ({type(module).__name__}) "
            f"knows {known}: expected the tokenizer of the model"
        )
    return with_masked_loss(
        type(module),
        job.data.inputs,
        share=share,
        mask=mask,
        words=min(len(tokenizer), known),
        special=sorted(set(tokenizer.all_special_ids)),
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
        return _counted(base.forward(self, **given).logits, batch[targets])

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def with_masked_loss(
    base: type[nn.Module],
    inputs: str,
    *,
    share: float,
    mask: int,
    words: int,
    special: Sequence[int] = (),
) -> type[nn.Module]:
    """A Hugging Face class whose forward takes a microbatch of text: each token is to be found
    again with a chance of `share`, drawn anew in each step, but for the ids in `special`; it is
    then seen as the id `mask`, as any of `words` ids, or as it is. Mean cross-entropy over these,
    and their number as weight."""

    def forward(self: nn.Module, **batch: Tensor) -> dict[str, Tensor]:
        ids = batch[inputs]  # (B, T)
        is_asked, how = (torch.rand(ids.shape, device=ids.device) for _ in range(2))
        other = (torch.rand(ids.shape, device=ids.device) * words).long()
        changed = torch.where(
            how < MASKED, mask, torch.where(how < MASKED + AS_ANOTHER, other, ids)
        )
        asked = is_asked < share
        for known in special:
            asked = asked & (ids != known)
        logits = base.forward(self, input_ids=torch.where(asked, changed, ids)).logits  # (B, T, V)
        return _counted(logits, torch.where(asked, ids, -100))

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _counted(logits: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """Mean cross-entropy of logits (B, T, V) over the targets (B, T) that are not -100, and their
    number as weight."""
    wanted = wanted.flatten()
    count = (wanted != -100).sum()
    total = F.cross_entropy(logits.float().flatten(0, 1), wanted, reduction="sum")
    return {"loss": total / count.clamp(min=1), "weight": count.float()}


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
