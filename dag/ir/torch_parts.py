"""Parts of torch that cannot be captured, and what to write in place of each."""

from __future__ import annotations

import os
import re
import traceback

import torch

__all__ = ["BY_MASK", "instead_in", "instead_of"]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

BY_MASK = (
    "how many elements a mask picks follows from its values, and a graph has sizes without them",
    "of a mask that never changes, make the index once, in __init__: self.index = "
    "mask.nonzero().squeeze(1), then h[:, self.index] or h.index_select(1, self.index); of one "
    "that follows from data, keep all elements: torch.where(mask, h, 0)",
)
"""Reason and advice for x[mask] and what is like it."""
_OPERATORS: tuple[tuple[str, str, str], ...] = (
    (
        r"_?embedding_renorm",
        "max_norm changes the weights of an embedding in each forward, and a graph changes weights "
        "by its optimizer only",
        "leave max_norm out, or normalise what is looked up: F.normalize(h, dim=-1)",
    ),
    (
        r"_embedding_bag",
        "nn.EmbeddingBag is no operator of a graph",
        "use nn.Embedding and reduce its rows: .sum(1), .mean(1) or .amax(1)",
    ),
    (
        r"rrelu",
        "nn.RReLU draws its slopes, which has no counter-based form",
        "use nn.LeakyReLU, or nn.PReLU for slopes that are trained",
    ),
    (
        r"fractional_max_pool",
        "fractional max pooling draws where it pools, which has no counter-based form",
        "use nn.AdaptiveMaxPool2d, or nn.MaxPool2d or nn.MaxPool3d",
    ),
    (
        r"adaptive_max_pool3d|max_pool3d_with_indices",
        "this pooling in three dimensions is no operator of a graph",
        "use nn.MaxPool3d without return_indices, or nn.AdaptiveAvgPool3d",
    ),
    (r"nonzero|masked_select", *BY_MASK),
)
"""Name of an operator without its namespace → reason, advice."""

_VALUES = r".* (GuardOnDataDependent|DataDependentOutput|DynamicOutputShape)"
_FRAMES: tuple[tuple[str, str, str], ...] = (
    (
        r"batchnorm\.py:forward" + _VALUES,
        "a batch norm with momentum=None averages over all steps so far, so its share follows from "
        "a counter",
        "give it a momentum, such as nn.BatchNorm1d(n, momentum=0.1)",
    ),
    (
        r":_detect_is_causal_mask" + _VALUES,
        "torch looks at the values of a mask to find out whether it is causal",
        "say whether it is: is_causal= of an encoder, tgt_is_causal= and memory_is_causal= of a "
        "decoder (src_is_causal= and so on of an nn.Transformer)",
    ),
    (
        r"rnn\.py:forward TypeError: zeros\(|:pack_padded_sequence|:pad_packed_sequence",
        "how much a packed sequence has depends on the lengths in the data",
        "give the recurrent layer padded sequences (batch_first=True), and leave the padding out "
        "of the loss, by a mask or labels of -100",
    ),
    (
        r":gaussian_nll_loss" + _VALUES,
        "F.gaussian_nll_loss looks at the values of var to refuse negative ones",
        "write it out: 0.5 * (var.log() + (mean - y).square() / var), with var.clamp(min=1e-6)",
    ),
    (
        r":ctc_loss" + _VALUES,
        "how much CTC computes depends on the lengths in the data",
        "there is no other form of it that could be captured; where outputs and labels are "
        "aligned, use F.cross_entropy",
    ),
    (
        r"adaptive\.py:" + _VALUES,
        "nn.AdaptiveLogSoftmaxWithLoss sorts the samples by the values of their labels",
        "use nn.Linear and F.cross_entropy over all classes",
    ),
)
"""File and function of torch in which it broke off, and the error → reason, advice."""


def instead_of(operator: str) -> tuple[str, str] | None:
    """Why no graph has an operator (`aten.NAME.OVERLOAD`), and what to write instead; None where
    nothing particular is known of it."""
    name = operator.split(".")[1] if "." in operator else operator
    return next(((why, what) for known, why, what in _OPERATORS if re.match(known, name)), None)


def instead_in(error: BaseException) -> tuple[str, str] | None:
    """The reason and the advice for the part of torch in which a forward broke off."""
    said = f"{type(error).__name__}: {error}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_TORCH + "nn" + os.sep):
            where = f"{os.path.basename(frame.filename)}:{frame.name} {said}"
            for known, why, what in _FRAMES:
                if re.search(known, where):
                    return why, what
    return None
