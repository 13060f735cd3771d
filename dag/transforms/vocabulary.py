"""The vocabulary head in blocks: its matrix split by rows, with an exact distributed log-sum-exp.

A language model ends in `linear(h, W, bias)`, W of V rows (one per word), and a cross entropy. Kept
whole, this pair is one heavy stage. Split into P blocks of rows (split_weights.py), with N tokens,
block b computes its own logits l_b (N, V_b) and three numbers per token, shape (N, 1) each:

    m_b = max_j l_bj        s_b = Σ_j exp(l_bj - m_b)        t_b = l_b,y if label y is in b, else 0

and the combination, from these alone,

    M = max_b m_b           loss = (M - Σ_b t_b) + log Σ_b s_b · exp(m_b - M)

which is -l_y + log Σ_j exp(l_j) over the whole vocabulary. No m_b is differentiated (it cancels):

    ∂loss/∂l_bj = exp(l_bj - m_b) · exp(m_b - M) / Σ_c s_c exp(m_c - M) - [j = y]

is softmax_j - [j = y], so the gradient is exact, too. M is subtracted before anything is rounded:
each block's own log-sum-exp instead would lose the digits of a small loss beside large logits.

Blocks read h and the labels and nothing of each other, so they may lie in any stages and run at the
same time; between stages travel h, the labels and m, s, t, never logits. Ignored labels, the three
reductions and what stands between linear and loss (reshapes, slices of tokens, casts, scales) are
those of the graph. A mean over no token at all is NaN with gradient 0, as in torch. A label that is
neither ignored nor a word fails in the first or the last block, as it does in the whole loss. Under
bf16 every block rounds its gradient of h to bf16 before they are summed, so that gradient differs
by this rounding; those of the weights do not.

The whole is written in operators of the allow-list, and nothing of it crosses the wire: a plan says
`head_parts`, and everybody who cuts a graph by a plan cuts `planned_graph(graph, plan)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..ir.graph import Arg, Dim, Graph, GraphError, Operator, Output, Parameter, Ref, TensorSpec
from ..plan.plan import Plan, PlanError
from .head import LOWEST, MEAN, RESHAPE, SUM, Head, find_head, linear_args
from .split_weights import blocks

__all__ = ["MAX_PARTS", "can_split", "head_operators", "planned_graph", "split_head"]

MAX_PARTS = 64
"""More blocks than this are refused: a plan from elsewhere must not blow the graph up."""


def can_split(graph: Graph) -> str:
    """Why the head of a graph cannot be split; empty: it can."""
    try:
        find_head(graph)
    except GraphError as error:
        return str(error)
    return ""


def split_head(graph: Graph, parts: int) -> Graph:
    """The graph, bound or not, with its head and cross entropy in `parts` blocks.

    Loss and gradients are equal to float tolerance; the loss keeps its name, and all other
    operators keep theirs and their order. A parameter W becomes the parameters `W..0/P`, ….
    Raises GraphError saying why it does not apply (`can_split`), or that `parts` is not in
    [2, min(V, MAX_PARTS)].
    """
    return _split(graph, parts)[0]


def head_operators(graph: Graph, parts: int) -> tuple[tuple[int, int], ...]:
    """The operators [start, stop) of each block of `split_head(graph, parts)`, consecutive.

    Before the first stand what prepares the labels, from the last one's stop on the combination:
    a stage boundary at any start or stop keeps the logits inside. Raises GraphError as it does.
    """
    return _split(graph, parts)[1]


def planned_graph(graph: Graph, plan: Plan) -> Graph:
    """The graph whose operators the plan's intervals count: itself, or the one with its head in
    `plan.head_parts` blocks. Raises PlanError when the head cannot be split so."""
    if plan.head_parts == 0:
        return graph
    try:
        return split_head(graph, plan.head_parts)
    except GraphError as error:
        raise PlanError(f"the plan wants a head in {plan.head_parts} parts: {error}") from None


@dataclass
class _Writer:
    """Writes operators, one after the other."""

    module: str
    grad: bool
    made: list[Operator] = field(default_factory=list)

    def put(
        self, name: str, target: str, args: tuple[Arg, ...], spec: TensorSpec, *, grad: bool = False
    ) -> Ref:
        output = Output(spec, grad and self.grad)
        self.made.append(Operator(name, f"aten.{target}", args, (), (output,), module=self.module))
        return Ref(name)


def _split(graph: Graph, parts: int) -> tuple[Graph, tuple[tuple[int, int], ...]]:
    head = find_head(graph)
    words = graph.spec[f"param:{head.weights[0][0]}"].sizes[0]
    if not 2 <= parts <= min(words, MAX_PARTS):
        raise GraphError(
            f"{parts} blocks of a head of {words} words: expected 2 to {min(words, MAX_PARTS)}"
        )
    at = graph.producer[head.loss.name]
    before = [op for op in graph.operators[:at] if op.name not in head.gone]
    write = _Writer(head.loss.module, head.loss.outputs[0].grad)
    tokens, dtype = graph.spec[head.target].shape[0], graph.spec[head.logits].dtype
    ignored, labels = _write_labels(write, head, tokens)
    bounds: list[tuple[int, int]] = []
    statistics: list[tuple[Ref, Ref, Ref]] = []
    for index in range(parts):
        start = len(before) + len(write.made)
        statistics.append(_write_block(write, graph, head, labels, index, parts))
        bounds.append((start, len(before) + len(write.made)))
    _write_combination(write, head, statistics, ignored, tokens, dtype)
    split = replace(
        graph,
        parameters=tuple(p for q in graph.parameters for p in _in_parts(q, head, parts)),
        operators=(*before, *write.made, *graph.operators[at + 1 :]),
    )
    if len({op.name for op in split.operators}) < len(split.operators):
        raise GraphError(f"operators are named like the blocks of {head.linear.name} already")
    return split, tuple(bounds)


def _in_parts(parameter: Parameter, head: Head, parts: int) -> tuple[Parameter, ...]:
    """The parameter, or its blocks when it is the head's."""
    if parameter.name not in (name for name, _ in head.weights):
        return (parameter,)
    names = zip(*(blocks(n, parts) for n in (parameter.name, *parameter.tied)), strict=True)
    made = []
    for first, *others in names:
        start, stop = first.rows(parameter.spec.sizes[0])
        spec = replace(parameter.spec, shape=(stop - start, *parameter.spec.shape[1:]))
        made.append(replace(parameter, name=str(first), spec=spec, tied=tuple(map(str, others))))
    return tuple(made)


def _write_labels(write: _Writer, head: Head, tokens: Dim) -> tuple[Ref, Ref]:
    """Which labels are ignored (N), and the labels (N, 1) with 0 in their places."""
    name, target = head.loss.name, Ref(head.target)
    flags, whole = TensorSpec((tokens,), "bool"), TensorSpec((tokens,), "int64")
    ignored = write.put(f"{name}/ignored", "eq.Scalar", (target, head.ignore), flags)
    known = write.put(f"{name}/known", "masked_fill.Scalar", (target, ignored, 0), whole)
    column = TensorSpec((tokens, 1), "int64")
    return ignored, write.put(f"{name}/labels", "unsqueeze.default", (known, 1), column)


def _write_block(
    write: _Writer, graph: Graph, head: Head, labels: Ref, index: int, parts: int
) -> tuple[Ref, Ref, Ref]:
    """One block; its m, s, t."""
    name = f"{head.linear.name}/{index}"
    start, stop = blocks("", parts)[index].rows(graph.spec[f"param:{head.weights[0][0]}"].sizes[0])
    logits = _write_logits(write, graph, head, name, index, parts, stop - start)
    spec = write.made[-1].outputs[0].spec
    assert spec is not None
    column = replace(spec, shape=(spec.shape[0], 1))
    flags, places = replace(column, dtype="bool"), replace(column, dtype="int64")

    fixed = write.put(f"{name}/fixed", "detach.default", (logits,), spec)
    top = write.put(f"{name}/top", "amax.default", (fixed, (1,), True), column)
    least = LOWEST[spec.dtype]
    top = write.put(f"{name}/max", "clamp.default", (top, least), column)
    below = write.put(f"{name}/below", "sub.Tensor", (logits, top), spec, grad=True)
    share = write.put(f"{name}/exp", "exp.default", (below,), spec, grad=True)
    total = write.put(f"{name}/sum", "sum.dim_IntList", (share, (1,), True), column, grad=True)

    # The first block lets a negative label through to `gather`, the last one a label beyond the
    # vocabulary: there it fails, as it would in the whole loss.
    place, outside = labels, None
    if index > 0:
        outside = write.put(f"{name}/under", "lt.Scalar", (labels, start), flags)
        place = write.put(f"{name}/place", "sub.Tensor", (labels, start), places)
        place = write.put(f"{name}/from", "clamp.default", (place, 0), places)
    if index < parts - 1:
        over = write.put(f"{name}/over", "ge.Scalar", (labels, stop), flags)
        place = write.put(f"{name}/upto", "clamp.default", (place, None, stop - start - 1), places)
        if outside is None:
            outside = over
        else:
            outside = write.put(f"{name}/out", "logical_or.default", (outside, over), flags)
    assert outside is not None
    found = write.put(f"{name}/found", "gather.default", (logits, 1, place), column, grad=True)
    mine = (found, outside, 0.0)
    target = write.put(f"{name}/target", "masked_fill.Scalar", mine, column, grad=True)
    return top, total, target


def _write_logits(
    write: _Writer, graph: Graph, head: Head, name: str, index: int, parts: int, rows: int
) -> Ref:
    """The logits of a block: the head's operators over its rows of the weights."""
    new: dict[str, str] = {}
    for (weight, cast), ref in zip(head.weights, linear_args(head.linear)[1:], strict=True):
        block = f"param:{blocks(weight, parts)[index]}"
        new[ref.value] = block
        if cast:
            new[ref.value] = f"{name}/{cast.name}"
            write.made.append(_renamed(cast, new[ref.value], {cast.reads[0]: block}, rows, True))
    for op in (head.linear, *head.chain):
        own = name if op is head.linear else f"{name}/{op.name}"
        write.made.append(_renamed(op, own, new, rows))
        new[op.name] = own
    return Ref(new[head.logits])


def _renamed(
    op: Operator, name: str, new: dict[str, str], rows: int, first: bool = False
) -> Operator:
    """An operator of the head for a block of `rows` words, which are its last dimension or, of a
    weight, the first."""
    spec = op.outputs[0].spec
    assert spec is not None
    shape = (rows, *spec.shape[1:]) if first else (*spec.shape[:-1], rows)
    op = op.renamed(new)
    args = op.args
    if op.target in RESHAPE:
        sizes = args[1]
        assert isinstance(sizes, tuple)
        args = (args[0], sizes if sizes[-1] == -1 else (*sizes[:-1], rows))
    return replace(
        op,
        name=name,
        args=args,
        outputs=(replace(op.outputs[0], spec=replace(spec, shape=shape)),),
    )


def _write_combination(
    write: _Writer,
    head: Head,
    statistics: Sequence[tuple[Ref, Ref, Ref]],
    ignored: Ref,
    tokens: Dim,
    dtype: str,
) -> None:
    """The loss from every block's m, s, t; the last operator has the loss's own name."""
    name = head.loss.name
    row, column = TensorSpec((tokens,), dtype), TensorSpec((tokens, 1), dtype)
    several, one = TensorSpec((tokens, len(statistics)), dtype), TensorSpec((), dtype)
    tops, sums, targets = zip(*statistics, strict=True)
    m = write.put(f"{name}/maxima", "cat.default", (tops, 1), several)
    s = write.put(f"{name}/sums", "cat.default", (sums, 1), several, grad=True)
    t = write.put(f"{name}/targets", "cat.default", (targets, 1), several, grad=True)
    top = write.put(f"{name}/top", "amax.default", (m, (1,), True), column)
    below = write.put(f"{name}/below", "sub.Tensor", (m, top), several)
    scale = write.put(f"{name}/scale", "exp.default", (below,), several)
    scaled = write.put(f"{name}/scaled", "mul.Tensor", (s, scale), several, grad=True)
    total = write.put(f"{name}/total", "sum.dim_IntList", (scaled, (1,)), row, grad=True)
    log = write.put(f"{name}/log", "log.default", (total,), row, grad=True)
    target = write.put(f"{name}/target", "sum.dim_IntList", (t, (1,)), row, grad=True)
    highest = write.put(f"{name}/max", "squeeze.dim", (top, 1), row)
    above = write.put(f"{name}/above", "sub.Tensor", (highest, target), row, grad=True)
    each = write.put(f"{name}/each", "add.Tensor", (above, log), row, grad=True)
    whole = head.reduction in (MEAN, SUM)
    counting = f"{name}/counting" if whole else name
    kept = write.put(counting, "masked_fill.Scalar", (each, ignored, 0.0), row, grad=True)
    if not whole:
        return
    summed = write.put(
        name if head.reduction == SUM else f"{name}/summed", "sum.default", (kept,), one, grad=True
    )
    if head.reduction == SUM:
        return
    flags, number = TensorSpec((tokens,), "bool"), TensorSpec((), "int64")
    counts = write.put(f"{name}/counts", "logical_not.default", (ignored,), flags)
    count = write.put(f"{name}/count", "sum.default", (counts,), number)
    least = write.put(f"{name}/least", "clamp.default", (count, 1), number)
    mean = write.put(f"{name}/mean", "div.Tensor", (summed, least), one, grad=True)
    # 0 / count: zero, or NaN when no label counts, without touching the gradient.
    zero = write.put(f"{name}/zero", "sub.Tensor", (count, count), number)
    empty = TensorSpec((), "float32")
    nothing = write.put(f"{name}/nothing", "div.Tensor", (zero, count), empty)
    write.put(name, "add.Tensor", (mean, nothing), one, grad=True)
