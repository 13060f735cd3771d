"""The eval form of a training graph, and the proof that it is what the module does in eval mode.

The eval form has the same operators under the same names, so a plan's cut fits both. Only known
flags differ: dropout passes its input on, attention has no dropout, batch norms use their running
statistics, recurrent layers run without their training flag.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Arg, Graph, GraphError, Operator, OperatorSet, Output, Ref, map_arg
from ..ir.operators import aten, takes_key
from . import norm
from .simplify import simplify

__all__ = ["EvaluationError", "check_evaluation", "evaluation", "only_masks_change"]

_NO_TRAINING = "aten._native_batch_norm_legit_no_training.default"
_RECURRENT = aten("lstm.input gru.input rnn_tanh.input rnn_relu.input")
_DROPOUT = frozenset({"shoal.dropout.default", "shoal.feature_dropout.default"})
_SAME_ELEMENTS = aten(
    "_reshape_alias _unsafe_view alias clone contiguous lift_fresh_copy reshape squeeze unsqueeze",
    "view view_as flatten.using_ints squeeze.dim squeeze.dims unflatten.int",
)
"""Copies and views with the elements of their first argument, in its order."""


class EvaluationError(GraphError):
    """The module in eval mode differs from the training graph in more than the known flags."""


def evaluation(graph: Graph) -> Graph:
    """The graph as it is in eval mode: no gradient, no update of a buffer. Names of operators and
    their number are the same; a batch norm has fewer results. Asked again, the same object."""
    return graph.once("evaluation", lambda: _evaluation(graph))


def _evaluation(graph: Graph) -> Graph:
    factors = {b.update.value: b.update.factor for b in graph.buffers if b.update}
    return replace(
        graph,
        operators=tuple(_evaluated(op, factors, graph.operator_set) for op in graph.operators),
        buffers=tuple(replace(b, update=None) for b in graph.buffers),
    )


def _evaluated(op: Operator, factors: dict[str, float], operator_set: OperatorSet) -> Operator:
    op = replace(op, outputs=tuple(replace(o, grad=False) for o in op.outputs))
    if op.target in _DROPOUT:
        return replace(op, target="aten.alias.default", args=op.args[:1], kwargs=())
    if op.target == "shoal.attention.default":
        query, key, value, mask, _, causal, scale, gqa, number = op.args
        if operator_set == "core":  # which has no composite attention
            args = (query, key, value, mask, 0.0, causal, scale, gqa, number)
            return replace(op, args=args)
        return replace(
            op,
            target="aten.scaled_dot_product_attention.default",
            args=(query, key, value, mask, 0.0, causal),
            kwargs=(("scale", scale), ("enable_gqa", gqa)),
        )
    if op.target == norm.BATCH_NORM and op.args[5] is True and f"{op.name}.3" in factors:
        # Its further results, which nobody reads, have another shape on every kind of device.
        return replace(
            op,
            target=_NO_TRAINING,
            args=(*op.args[:5], factors[f"{op.name}.3"], op.args[7]),
            outputs=(op.outputs[0], Output(None), Output(None)),
        )
    if op.target in _RECURRENT:
        return replace(op, args=(*op.args[:6], False, *op.args[7:]))
    return op


def only_masks_change(graph: Graph) -> bool:
    """Whether the eval form differs from the graph by what draws masks alone."""
    pairs = zip(graph.operators, evaluation(graph).operators, strict=True)
    return all(
        a.target in _DROPOUT
        or a.target == "shoal.attention.default"
        or (a.target, a.args) == (b.target, b.args)
        for a, b in pairs
    )


_Line = tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]


def _lines(graph: Graph) -> tuple[list[tuple[Operator, _Line]], list[Arg]]:
    """Each operator with what it does, free of the names that the tracer chose, and the results.

    A value with the elements of another one is that one in another shape, and no operator: which
    copies and views there are depends on the version of torch, and in eval mode a dropout is one.
    """
    names: dict[str, str] = {}
    shapes = graph.spec

    def plain(arg: Arg) -> Arg:
        return Ref(names.get(arg.value, arg.value)) if isinstance(arg, Ref) else arg

    lines: list[tuple[Operator, _Line]] = []
    roots: dict[str, str] = {}
    for op in graph.operators:
        first = op.args[0] if op.args else None
        if op.target in _SAME_ELEMENTS and isinstance(first, Ref):
            root = roots[op.name] = roots.get(first.value, first.value)
            shape = shapes[op.name].shape
            same = shape == shapes[root].shape
            names[op.name] = names.get(root, root) + ("" if same else f" as {shape}")
            continue
        number = len(lines)
        args = tuple(map_arg(a, plain) for a in op.args)
        kwargs = {k: map_arg(a, plain) for k, a in op.kwargs}
        names |= {v: f"{number}.{i}" for i, v in enumerate(op.values)}
        if takes_key(op.target):
            args = args[:-1]  # the operator's number
        if op.target == "aten.scaled_dot_product_attention.default":
            defaults: tuple[Arg, ...] = (None, 0.0, False)
            args = (*args, *defaults[len(args) - 3 :])
            kwargs = {"scale": None, "enable_gqa": False} | kwargs
        lines.append((op, (op.target, args, tuple(sorted(kwargs.items())))))
    results = (graph.loss, graph.weight, *(value for _, value in graph.metrics))
    return lines, [plain(Ref(value)) for value in results]


def check_evaluation(graph: Graph, captured: Graph) -> None:
    """Raises EvaluationError unless `evaluation(graph)` is, operator by operator, `captured`: the
    module exported in eval mode."""
    derived, our_results = _lines(simplify(evaluation(graph)))
    exported, their_results = _lines(simplify(captured))
    for (ours, our_line), (theirs, their_line) in zip(derived, exported, strict=False):
        if our_line != their_line:
            where = f"module {theirs.module or ours.module!r}"
            if theirs.target in _DROPOUT:
                raise EvaluationError(
                    f"{where} drops in eval mode too ({theirs!r}): use nn.Dropout, or "
                    "F.dropout(x, p, training=self.training)"
                )
            if theirs.target == norm.BATCH_NORM and theirs.args[5] is True:
                raise EvaluationError(
                    f"{where} normalises by the statistics of the batch in eval mode too, and so "
                    "changes its running ones: use F.batch_norm(…, training=self.training), or "
                    "nn.BatchNorm with track_running_stats=False"
                )
            if takes_key(ours.target) and not takes_key(theirs.target):
                raise EvaluationError(
                    f"{where} draws {ours!r} in train mode only: write the mask as dropout, which "
                    "the capture knows, such as h * F.dropout(h.new_ones(h.shape[0], 1), p, "
                    "self.training), and nn.Dropout in place of nn.AlphaDropout"
                )
            if theirs.target == ours.target == "aten.instance_norm.default":
                raise EvaluationError(
                    f"{where} is an instance norm that normalises by its running statistics in "
                    "eval mode only, which no graph can: leave track_running_stats out, or use "
                    "nn.GroupNorm or a batch norm"
                )
            raise EvaluationError(
                f"{where} does something else in eval mode than known flags explain: expected "
                f"{ours!r}, got {theirs!r}; let forward do the same in both modes, apart from "
                "dropout and batch norm"
            )
    if len(derived) != len(exported):
        raise EvaluationError(
            f"the model runs {len(exported)} operators in eval mode, expected {len(derived)} as in "
            "train mode: let forward do the same in both, apart from dropout and batch norm"
        )
    ours_out = (len(graph.metrics), [n for n, _ in graph.metrics], bool(graph.weight))
    theirs_out = (len(captured.metrics), [n for n, _ in captured.metrics], bool(captured.weight))
    if ours_out != theirs_out:
        raise EvaluationError(
            f"the model returns other entries in eval mode: expected {ours_out[1]}, got "
            f"{theirs_out[1]}"
        )
    if our_results != their_results:
        raise EvaluationError(
            "the model returns other values as its loss, weight or metrics in eval mode: let "
            "forward do the same in both modes, apart from dropout and batch norm"
        )
