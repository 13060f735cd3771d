"""The eval form of a training graph, and the proof that it is what the module does in eval mode.

The eval form has the same operators under the same names, so a plan's cut fits both. Only known
flags differ: dropout passes its input on, attention has no dropout, batch norms use their running
statistics, recurrent layers run without their training flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from . import norm
from .graph import Arg, Graph, GraphError, Operator, OperatorSet, Output, Ref, map_arg
from .operators import takes_key
from .simplify import simplify

__all__ = ["EvaluationError", "check_evaluation", "evaluation"]

_NO_TRAINING = "aten._native_batch_norm_legit_no_training.default"
_RECURRENT = frozenset(f"aten.{n}.input" for n in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
_DROPOUT = frozenset({"shoal.dropout.default", "shoal.feature_dropout.default"})


class EvaluationError(GraphError):
    """The module in eval mode differs from the training graph in more than the known flags."""


def evaluation(graph: Graph) -> Graph:
    """The same graph as in eval mode: no gradient, no update of a buffer. Names of operators and
    their number are the same; a batch norm has fewer results."""
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


_Line = tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]


def _lines(graph: Graph) -> Iterator[tuple[Operator, _Line]]:
    """Each operator with what it does, free of the names that the tracer chose."""
    names: dict[str, str] = {}

    def plain(arg: Arg) -> Arg:
        return Ref(names.get(arg.value, arg.value)) if isinstance(arg, Ref) else arg

    for number, op in enumerate(graph.operators):
        names |= {v: f"{number}.{i}" for i, v in enumerate(op.values)}
        args = tuple(map_arg(a, plain) for a in op.args)
        kwargs = {k: map_arg(a, plain) for k, a in op.kwargs}
        if takes_key(op.target):
            args = args[:-1]  # the operator's number
        if op.target == "aten.scaled_dot_product_attention.default":
            defaults: tuple[Arg, ...] = (None, 0.0, False)
            args = (*args, *defaults[len(args) - 3 :])
            kwargs = {"scale": None, "enable_gqa": False} | kwargs
        # Dropout in eval mode is either.
        plain_copy = op.target == "aten.clone.default" and not kwargs
        target = "aten.alias.default" if plain_copy else op.target
        yield op, (target, args, tuple(sorted(kwargs.items())))


def check_evaluation(graph: Graph, captured: Graph) -> None:
    """Raises EvaluationError unless `evaluation(graph)` is, operator by operator, `captured`: the
    module exported in eval mode."""
    derived = list(_lines(simplify(evaluation(graph))))
    exported = list(_lines(simplify(captured)))
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
