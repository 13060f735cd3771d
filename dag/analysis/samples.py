"""Whether a graph treats each sample of a microbatch for itself, found from its operators alone.

The loss of a step is Σ weight·loss / Σ weight over its microbatches. It is the same for every
division of a batch into microbatches where weight·loss and weight are sums over the samples. That
is what `why_samples_meet` proves, without a value of a weight: it says of every tensor how it hangs
on the samples (`sample_kinds.py`), and what an operator makes of that. Where it knows of no way (a
sort over all tokens, statistics of the batch), it names the operator.

Masks of random operators are taken for part of the operator: they differ with the division anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..ir.graph import Graph, Operator, Ref, Size
from ..ir.operators import POINTWISE
from .sample_kinds import (
    COUNT,
    FIXED,
    Kind,
    MeetError,
    Numbers,
    SampleRows,
    SampleShare,
    SampleSum,
    fits,
    is_whole,
    words,
)
from .sample_operator import SeenOperator

__all__ = ["why_samples_meet"]


def why_samples_meet(graph: Graph, ignores_none: Callable[[Operator], bool]) -> str:
    """Why another division of a batch could be another training, in words; empty: it is the same.

    The graph is for any batch. `ignores_none`: whether a cross-entropy counts every label of the
    data; its mean is over those that it counts.
    """
    kinds: dict[str, Kind] = {f"param:{p.name}": FIXED for p in graph.parameters}
    kinds |= {f"buffer:{b.name}": FIXED for b in graph.buffers}
    kinds |= {f"in:{i.name}": SampleRows(0) for i in graph.inputs}
    whole = {f"in:{i.name}" for i in graph.inputs if i.spec.dtype == "bool"}
    counted = _counted(graph)
    for op in graph.operators:
        if is_whole(op, whole):
            whole.update(op.values)
        try:
            made = Seen(op, graph.spec, kinds, ignores_none, whole, counted).kind()
        except MeetError as error:
            where = f"module {op.module!r}" if op.module else "the model itself"
            return f"{op.target.split('.')[1]} of {where} {str(error) or 'may mix samples'}"
        for value, output in zip(op.values, op.outputs, strict=True):
            if output.spec is not None and fits(made, output.spec.shape):
                kinds[value] = made  # else it is a by-product; who reads it is refused
    loss = kinds.get(graph.loss)
    weight = kinds.get(graph.weight) if graph.weight else FIXED
    if not isinstance(loss, SampleShare):
        return "the loss is no mean over samples"
    if weight != SampleSum(loss.of) and (loss.of != COUNT or weight != FIXED):
        return "the loss is a mean over something else than its weight"
    return ""


def _counted(graph: Graph) -> dict[tuple[str, Any], str]:
    """Labels and the one that is ignored, to the sum of those that are not, where that is what the
    graph's weight is: a cross-entropy of these labels is a mean over it."""
    by = {value: op for op in graph.operators for value in op.values}
    total = by.get(graph.weight or "")
    while total is not None and total.target == "aten._to_copy.default":
        total = by.get(total.reads[0])
    if total is None or total.target != "aten.sum.default":
        return {}
    other = by.get(total.reads[0])
    if other is None or other.target != "aten.ne.Scalar":
        return {}
    return {(other.reads[0], other.args[1]): total.name}


class Seen(SeenOperator):
    """The rules of all operators."""

    def kind(self) -> Kind:
        """The kind of the operator's results; a by-product may be of another kind."""
        if any(v not in self.kinds for v in self.reads):
            self.meet("reads a by-product")
        rule = _RULES.get(self.name)
        kinds = [self.kinds[v] for v in self.reads]
        if all(k == FIXED for k in kinds) or self.name in ("new_ones", "new_zeros", "new_full"):
            made = self._of_nothing()
        elif any(isinstance(k, Numbers) for k in kinds) and self.name not in ("unsqueeze", "index"):
            self.meet("works with the numbers of the samples")
        elif self.knows_batch() and self.name not in ("div", "native_group_norm"):
            self.meet("knows how many samples there are")
        elif rule is not None:
            made = rule(self)
        elif self.op.target in POINTWISE or self.name in _LIKE_POINTWISE:
            made = self.pointwise()
        else:
            self.meet()
        return made if fits(made, self.out) else self.meet()

    def _of_nothing(self) -> Kind:
        """The kind of a value that depends on no sample: the same everywhere, or as often as there
        are samples."""
        sized = [(i, d) for i, d in enumerate(self.out) if isinstance(d, Size)]
        if self.name == "arange" and self.op.args == (Size(1),):
            return Numbers(0)
        if self.knows_batch():
            number = self.op.args[-1] if self.op.args else None
            if self.name in ("full", "scalar_tensor") and isinstance(number, Size) and not sized:
                return SampleSum(COUNT) if number.plus == 0 else self.meet()
            self.meet("knows how many samples there are")
        if not sized:
            return FIXED
        if self.name not in _REPEATS:
            self.meet("counts the samples")
        return SampleRows(sized[0][0], sized[0][1].times)

    # ------------------------------------------------------------ rules

    def reduced(self) -> Kind:
        source = self.arg(0)
        found = self.of(source)
        if not isinstance(found, SampleRows):
            return self._linear_sum(found)
        rank = len(self.shape(source))
        dims = self.dims(self.arg(1), rank)
        if found.dim not in dims:
            keep = self.arg(2, dict(self.op.kwargs).get("keepdim", False))
            less = 0 if keep else sum(d < found.dim for d in dims)
            return SampleRows(found.dim - less, found.times)
        if self.name == "sum":
            return SampleSum(self.op.name)
        if self.name == "mean":
            return SampleShare(COUNT)
        self.meet("reduces over the samples")

    def _linear_sum(self, found: Kind) -> Kind:
        """A sum or mean over further dimensions of what is a sum or share already."""
        if self.name not in ("sum", "mean") or not isinstance(found, (SampleSum, SampleShare)):
            self.meet()
        if isinstance(found, SampleSum) and found.bounded:
            self.meet()
        return SampleSum(self.op.name) if isinstance(found, SampleSum) else found

    def along(self, place: int = 1, default: int | None = None) -> SampleRows:
        """What works along one dimension, which is the argument at `place`."""
        source = self.arg(0)
        found = self.rows(source)
        self.fixed(*self.op.args[1 : place + 1])
        dim = self.arg(place, dict(self.op.kwargs).get("dim", default))
        if not isinstance(dim, (int, tuple)) or found.dim in self.dims(
            dim, len(self.shape(source))
        ):
            self.meet("works along the samples")
        return found

    def picked(self) -> Kind:
        """select, unbind: one place of a dimension, which is gone."""
        found = self.along(default=0)
        dim = self.arg(1, 0) % len(self.shape(self.arg(0)))
        return SampleRows(found.dim - (dim < found.dim), found.times)

    def corner(self) -> Kind:
        """tril, triu: the last two dimensions."""
        found = self.rows(self.arg(0))
        return found if found.dim < len(self.out) - 2 else self.meet()

    def last(self) -> Kind:
        """A norm over the last dimensions."""
        found = self.rows(self.arg(0))
        self.fixed(*self.op.args[1:])
        over = len(self.arg(1)) if isinstance(self.arg(1), tuple) else 1
        if found.dim >= len(self.shape(self.arg(0))) - over:
            self.meet("normalises over the samples")
        return found

    def by_sample(self) -> Kind:
        """What torch defines for (samples, …): convolutions, pools, groups."""
        found = self.rows(self.arg(0))
        self.fixed(*self.op.args[1:])
        return found if found.dim == 0 else self.meet()

    def linear(self) -> Kind:
        found = self.rows(self.arg(0))
        self.fixed(*self.op.args[1:])
        return found if found.dim < len(self.shape(self.arg(0))) - 1 else self.meet()

    def product(self) -> Kind:
        """matmul, mm, bmm: rows of the left factor, or one product for each sample."""
        a, b = self.arg(0), self.arg(1)
        left, right = self.of(a), self.of(b)
        ranks = len(self.shape(a)), len(self.shape(b))
        if min(ranks) < 2:
            self.meet()
        if isinstance(left, SampleRows) and right == FIXED and left.dim < ranks[0] - 1:
            return SampleRows(left.dim - ranks[0] + len(self.out), left.times)
        if left == FIXED and isinstance(right, SampleRows) and right.dim != ranks[1] - 2:
            return SampleRows(right.dim - ranks[1] + len(self.out), right.times)
        found = self.aligned(a, b)
        if found is None or found.dim >= len(self.out) - 2:
            self.meet("multiplies samples with each other")
        return found

    def added_product(self) -> Kind:
        """addmm: a bias, and rows times a matrix."""
        found = self.rows(self.arg(1))
        self.fixed(self.arg(0), self.arg(2))
        return found if found.dim == 0 else self.meet()

    def attention(self) -> Kind:
        found = self.aligned(*(self.arg(i) for i in range(3)))
        mask = self.arg(3)
        if found is None or found.dim >= len(self.out) - 2:
            self.meet()
        self.aligned(self.arg(0), mask)
        return found

    def padded(self) -> Kind:
        """pad: the last dimensions, two numbers for each."""
        found, pads = self.rows(self.arg(0)), self.arg(1)
        self.fixed(*self.op.args[1:])
        if not isinstance(pads, tuple) or found.dim >= len(self.out) - len(pads) // 2:
            self.meet("pads along the samples")
        return found

    def replaced(self) -> Kind:
        """slice_scatter: a part of each sample by another."""
        found, dim = self.rows(self.arg(0)), self.arg(2, 0)
        if self.of(self.arg(1)) != found or dim % len(self.out) == found.dim:
            self.meet()
        return found

    def looked_up(self) -> Kind:
        """embedding: a row for each index."""
        self.fixed(self.arg(0))
        if self.arg(3, dict(self.op.kwargs).get("scale_grad_by_freq", False)):
            self.meet("scales gradients by how often a microbatch has a row")
        return self.rows(self.arg(1))

    def gathered(self) -> Kind:
        """gather, scatter: along a dimension, each sample its own."""
        tensors = [a for a in self.op.args if isinstance(a, Ref)]
        kinds = {self.of(a) for a in tensors}
        dim = self.arg(1)
        if len(kinds) != 1 or not isinstance(dim, int):
            self.meet()
        found = self.rows(tensors[0])
        return found if dim % len(self.out) != found.dim else self.meet()

    def reshaped(self) -> Kind:
        source = self.arg(0)
        found = self.rows(source)
        outer = math.prod(self.shape(source)[: found.dim])  # type: ignore[arg-type]
        before = 1
        for dim, size in enumerate(self.out):
            if isinstance(size, Size):
                return (
                    SampleRows(dim, size.times)
                    if before == outer and not size.plus
                    else self.meet()
                )
            before *= size
        self.meet()

    def permuted(self) -> Kind:
        found = self.rows(self.arg(0))
        rank = len(self.out)
        order = list(range(rank))
        if self.name == "permute":
            order = [d % rank for d in self.arg(1)]
        elif rank > 1:
            a, b = (0, 1) if self.name == "t" else (self.arg(1) % rank, self.arg(2) % rank)
            order[a], order[b] = order[b], order[a]
        return SampleRows(order.index(found.dim), found.times)

    def widened(self) -> Kind:
        """Rule of unsqueeze."""
        found = self.of(self.arg(0))
        if isinstance(found, Numbers):
            return Numbers(found.dim + (self.arg(1) % len(self.out) <= found.dim))
        found = self.rows(self.arg(0))
        return SampleRows(found.dim + (self.arg(1) % len(self.out) <= found.dim), found.times)

    def indexed(self) -> Kind:
        """index: each sample looks up its own rows, by its number and places that are fixed."""
        source, places = self.arg(0), self.arg(1)
        if self.rows(source) != SampleRows(0) or not all(isinstance(p, Ref) for p in places):
            self.meet()
        number = self.of(places[0])
        self.fixed(*places[1:])
        if not isinstance(number, Numbers):
            self.meet("looks up rows of other samples")
        behind = len(self.shape(source)) - len(places)
        return SampleRows(len(self.out) - behind + number.dim - len(self.shape(places[0])))

    def differences(self) -> Kind:
        """diff: along a dimension, with more before and behind."""
        found = self.along(2, -1)
        more = {self.of(a) for a in self.op.args[3:] if isinstance(a, Ref)}
        return found if more <= {found} else self.meet()

    def narrowed(self) -> Kind:
        """Rule of squeeze."""
        found = self.rows(self.arg(0))
        shape = self.shape(self.arg(0))
        if len(self.op.args) < 2:
            dims = {i for i, d in enumerate(shape) if d == 1}
        else:
            dims = {d for d in self.dims(self.arg(1), len(shape)) if shape[d] == 1}
        return SampleRows(found.dim - sum(d < found.dim for d in dims), found.times)

    def spread(self) -> Kind:
        """expand: from the last dimension on."""
        return self.aligned(self.arg(0)) or self.meet()

    def joined(self) -> Kind:
        """Rule of cat and stack."""
        parts, dim = self.arg(0), self.arg(1, 0)
        kinds = {self.of(p) for p in parts}
        if len(kinds) != 1:
            self.meet()
        found = self.rows(parts[0])
        dim %= len(self.out)
        if self.name == "stack":
            return SampleRows(found.dim + (dim <= found.dim), found.times)
        return found if dim != found.dim else self.meet("joins samples")

    def classes(self) -> Kind:
        """Cross-entropies of (rows, classes, …) and labels of (rows, …)."""
        logits, labels = self.arg(0), self.arg(1)
        kinds = {self.of(logits), self.of(labels)}
        self.fixed(self.arg(2))
        reduction = self.arg(3, dict(self.op.kwargs).get("reduction", 1))
        if len(kinds) != 1 or self.rows(logits).dim == 1 or len(self.shape(logits)) < 2:
            self.meet()
        if reduction == 0:
            return self.rows(labels)
        if reduction == 2:
            return SampleSum(self.op.name)
        if self.arg(2) is not None:
            self.meet("weighs its mean by the classes of the microbatch")
        ignored = self.arg(4, dict(self.op.kwargs).get("ignore_index", -100))
        if (of := self.counted.get((labels.value, ignored))) is not None:
            return SampleShare(of)
        if not self.ignores_none(self.op):
            self.meet("takes its mean over the labels that are not ignored")
        return SampleShare(COUNT)

    def error(self) -> Kind:
        """Losses of a prediction and a target, element by element."""
        place = 4 if self.name.endswith("logits") else 3 if self.name.startswith("binary") else 2
        reduction = self.arg(place, dict(self.op.kwargs).get("reduction", 1))
        tensors = [a for a in self.op.args if isinstance(a, Ref)]
        ranks = {len(self.shape(a)) for a in tensors[:2]}
        kinds = {self.of(a) for a in tensors[:2]}
        self.fixed(*tensors[2:])
        if len(kinds) != 1 or len(ranks) != 1:
            self.meet()
        found = self.rows(tensors[0])
        return (found, SampleShare(COUNT), SampleSum(self.op.name))[reduction]


_LIKE_POINTWISE = words(
    "_to_copy to alias clone contiguous detach type_as lift_fresh_copy dropout feature_dropout "
    "broadcast_tensors bernoulli_like zeros_like ones_like full_like masked_fill where "
    "_native_batch_norm_legit_no_training"
)
_REPEATS = words(
    "full zeros ones expand new_full new_zeros new_ones zeros_like ones_like full_like repeat "
    "expand_as broadcast_to bernoulli rand randn exponential"
)
"""Make rows that are all alike, or as random as each other."""


def _rules(names: str, rule: Callable[[Seen], Kind]) -> dict[str, Callable[[Seen], Kind]]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Callable[[Seen], Kind]] = (
    _rules("sum mean amax amin any all logsumexp prod var argmax argmin", Seen.reduced)
    | _rules("_softmax softmax _log_softmax log_softmax cumsum flip narrow", Seen.along)
    | _rules("sort glu", lambda s: s.along(default=-1))
    | _rules("slice", lambda s: s.along(default=0))
    | _rules("topk", lambda s: s.along(2, -1))
    | _rules("split split_with_sizes chunk unsafe_chunk", lambda s: s.along(2, 0))
    | _rules("tril triu", Seen.corner)
    | _rules("select unbind", Seen.picked)
    | _rules("layer_norm native_layer_norm rms_norm _fused_rms_norm", Seen.last)
    | _rules("convolution conv1d conv2d conv3d", Seen.by_sample)
    | _rules("group_norm native_group_norm max_pool2d avg_pool2d", Seen.by_sample)
    | _rules("adaptive_avg_pool2d _adaptive_avg_pool2d max_pool2d_with_indices", Seen.by_sample)
    | _rules("linear", Seen.linear)
    | _rules("matmul mm bmm", Seen.product)
    | _rules("addmm", Seen.added_product)
    | _rules("scaled_dot_product_attention attention", Seen.attention)
    | _rules("pad constant_pad_nd", Seen.padded)
    | _rules("slice_scatter", Seen.replaced)
    | _rules("embedding", Seen.looked_up)
    | _rules("gather scatter scatter_add", Seen.gathered)
    | _rules("reshape view _unsafe_view _reshape_alias flatten unflatten view_as", Seen.reshaped)
    | _rules("permute transpose swapaxes t", Seen.permuted)
    | _rules("unsqueeze", Seen.widened)
    | _rules("index", Seen.indexed)
    | _rules("diff", Seen.differences)
    | _rules("squeeze", Seen.narrowed)
    | _rules("expand expand_as broadcast_to", Seen.spread)
    | _rules("cat stack", Seen.joined)
    | _rules("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d", Seen.classes)
    | _rules("mse_loss l1_loss smooth_l1_loss huber_loss", Seen.error)
    | _rules("binary_cross_entropy binary_cross_entropy_with_logits", Seen.error)
)
