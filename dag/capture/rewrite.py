"""Which fx nodes become another operator of the graph than they are.

Random operators become Shoal's own, whose masks are counter-based (dag/ir/random.py), and so do
those that route tokens to experts (dag/ir/experts.py). A view becomes a reshape: whether a view is
possible depends on strides, and a tensor that crossed a link has lost its own. Uninitialised memory
becomes zeros: a model that fills it before it reads it sees no difference, and no other reads
anything of a peer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ir.capture_errors import CaptureError, line_of, refused

__all__ = ["Rewrite", "rewrite"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Rewrite:
    """What a node is written as. Only `args` and `kwargs` are needed by it then. `first_only`: the
    node returns a tuple, the rewritten operator only the first item of it."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    first_only: bool = False


def _arg(node: Node, index: int, name: str, default: Any) -> Any:
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def _native_dropout(node: Node) -> Rewrite:
    x, p, train = node.args[0], node.args[1], _arg(node, 2, "train", True)
    if train is False or p == 0:
        return Rewrite("aten.alias.default", (x,), first_only=True)
    return Rewrite("shoal.dropout.default", (x, p), first_only=True)


def _feature_dropout(node: Node) -> Rewrite | None:
    """x * (bernoulli(empty like one per feature map, 1 - p) / (1 - p))."""
    x, noise = node.args
    if not (isinstance(noise, Node) and noise.target is aten.div.Scalar):
        return None
    draw, keep = noise.args
    if not (isinstance(draw, Node) and draw.target is aten.bernoulli.p and draw.args[1] == keep):
        return None
    assert isinstance(x, Node)
    assert isinstance(keep, float)
    shape, full = draw.meta["val"].shape, x.meta["val"].shape
    if len(shape) != len(full) or shape[:2] != full[:2] or any(s != 1 for s in shape[2:]):
        return None
    return Rewrite("shoal.feature_dropout.default", (x, round(1.0 - keep, 12)))


def _attention(node: Node) -> Rewrite | None:
    p = _arg(node, 4, "dropout_p", 0.0)
    if p == 0:
        return None
    return Rewrite(
        "shoal.attention.default",
        (
            *node.args[:3],
            _arg(node, 3, "attn_mask", None),
            p,
            _arg(node, 5, "is_causal", False),
            node.kwargs.get("scale"),
            node.kwargs.get("enable_gqa", False),
        ),
    )


def _copy(node: Node) -> Rewrite:
    """Assignment to a part of a tensor: the part's shape and dtype, the source's elements. (torch
    has no derivative for the functional `copy`, and a zero one for `fill`.)"""
    target, source = (a.meta["val"] for a in node.args[:2] if isinstance(a, Node))
    if target.dtype == source.dtype:
        return Rewrite("aten.expand.default", (node.args[1], tuple(target.shape)))
    if target.dim() != source.dim():
        raise CaptureError(
            f"{line_of(node)}\n  this assignment changes both dtype and shape of "
            f"{source.dtype}: write .to({target.dtype}) first"
        )
    return Rewrite("aten._to_copy.default", (node.args[1],), {"dtype": target.dtype})


def _makes(node: Node, target: str, *more: Any) -> Rewrite:
    """As an operator that makes a tensor, here of the node's shape; `more`: what else it takes."""
    value = node.meta["val"]
    how = {"dtype": value.dtype, "device": value.device}
    return Rewrite(target, (tuple(value.shape), *more), how)


def _empty(node: Node) -> Rewrite:
    return _makes(node, "aten.full.default", False if node.meta["val"].dtype == torch.bool else 0)


def _histogram(node: Node) -> Rewrite:
    bins = _arg(node, 1, "bins", 100)
    low, high = _arg(node, 2, "min", 0), _arg(node, 3, "max", 0)
    if not low < high:
        raise refused(
            line_of(node),
            "the range of this histogram depends on its values",
            "give histc a min and a max",
        )
    return Rewrite("shoal.histogram.default", (node.args[0], bins, float(low), float(high)))


def _grouped_mm(node: Node) -> Rewrite:
    x, weight = (a.meta["val"] for a in node.args[:2] if isinstance(a, Node))
    ends, made = _arg(node, 2, "offs", None), node.meta["val"]
    if (x.dim(), weight.dim()) != (2, 3) or ends is None or _arg(node, 3, "bias", None) is not None:
        raise refused(
            line_of(node),
            "this form of a grouped product cannot be captured",
            "write rows (S, K) times a matrix for each group (E, K, N), with offsets, without bias",
        )
    if made.dtype != x.dtype:
        raise refused(
            line_of(node),
            f"this grouped product of {x.dtype} gives {made.dtype}",
            "leave out out_dtype, and write .to(…) behind it",
        )
    return Rewrite("shoal.grouped_mm.default", (node.args[0], node.args[1], ends))


def _recurrent(node: Node) -> Rewrite | None:
    layers, p, train = node.args[4:7]
    if train and p != 0 and layers != 1:
        raise CaptureError(
            f"{line_of(node)}\n  dropout={p} inside a recurrent layer of {layers} layers has no "
            "counter-based mask: stack one-layer modules with nn.Dropout between them"
        )
    return None


def _embedding(node: Node) -> Rewrite | None:
    if _arg(node, 4, "sparse", False):
        raise CaptureError(
            f"{line_of(node)}\n  this embedding has a sparse gradient, which no stage can "
            "send, sum or clip: write sparse=False"
        )
    return None


_REWRITES: dict[Any, Callable[[Node], Rewrite | None]] = {
    aten.native_dropout.default: _native_dropout,
    aten.mul.Tensor: _feature_dropout,
    aten.scaled_dot_product_attention.default: _attention,
    aten.empty.memory_format: _empty,
    aten.empty_like.default: _empty,
    aten.empty_permuted.default: _empty,
    aten.empty_strided.default: _empty,
    aten.new_empty.default: _empty,
    aten.new_empty_strided.default: _empty,
    aten.histc.default: _histogram,
    aten._grouped_mm.default: _grouped_mm,
    aten.copy.default: _copy,
    aten.fill.Tensor: _copy,
    aten.fill.Scalar: lambda n: _makes(n, "aten.full.default", n.args[1]),
    aten.embedding.default: _embedding,
    aten.lstm.input: _recurrent,
    aten.gru.input: _recurrent,
    aten.rnn_tanh.input: _recurrent,
    aten.rnn_relu.input: _recurrent,
    aten.bernoulli.p: lambda n: _makes(n, "shoal.bernoulli.default", n.args[1]),
    aten.bernoulli.default: lambda n: Rewrite("shoal.bernoulli_like.default", (n.args[0],)),
    aten.rand.default: lambda n: _makes(n, "shoal.rand.default"),
    aten.rand_like.default: lambda n: _makes(n, "shoal.rand.default"),
    aten.randn.default: lambda n: _makes(n, "shoal.randn.default"),
    aten.randn_like.default: lambda n: _makes(n, "shoal.randn.default"),
    aten.exponential.default: lambda n: _makes(
        n, "shoal.exponential.default", _arg(n, 1, "lambd", 1.0)
    ),
    aten.view.default: lambda n: Rewrite("aten.reshape.default", n.args[:2]),
    aten._unsafe_view.default: lambda n: Rewrite("aten.reshape.default", n.args[:2]),
    aten._reshape_alias.default: lambda n: Rewrite("aten.reshape.default", n.args[:2]),
}


_FOREIGN: dict[str, Callable[[Node], Rewrite | None]] = {
    "transformers.grouped_mm_fallback.default": _grouped_mm,
}
"""Operators of other libraries, which are there only when these are imported."""


def rewrite(node: Node) -> Rewrite:
    """How the node is written in the graph: as itself, if nothing else is known of it."""
    known = _REWRITES.get(node.target) or _FOREIGN.get(str(node.target))
    found = known(node) if known else None
    if found is not None:
        return found
    from ..ir.fx_args import target_of

    return Rewrite(target_of(node), tuple(node.args), dict(node.kwargs))
