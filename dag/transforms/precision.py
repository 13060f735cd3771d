"""Mixed precision as explicit casts (dtype = "bf16" and "fp16").

The rules are those of torch's autocast on CUDA, applied to the graph instead of at run time, so
that executing needs no mode, every device computes the same, and the spec of a port is what really
flows. Weights stay float32; each use has its own cast, next to its consumer, so that a link never
carries a cast weight (one may be kept in bfloat16 besides: below). The loss, the weight and the
metrics are float32. What runs in fewer bits is `lower`: "bfloat16" or "float16".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.graph import Arg, Dtype, Graph, Operator, Output, Ref, TensorSpec
from ..ir.infer import Inferred, infer_operator, outside
from ..ir.operators import aten

__all__ = ["AS_MADE", "HIGHER", "LOWER", "KeptDtypes", "cast_of", "mixed"]


LOWER = aten(
    """addbmm addmm addmv baddbmm bilinear bmm conv1d conv1d.padding conv2d conv2d.padding conv3d
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution einsum gru.input
    gru_cell linear lstm.input lstm_cell matmul mm mv rnn_relu.input rnn_tanh.input
    scaled_dot_product_attention prelu"""
) | {"shoal.attention.default", "shoal.grouped_mm.default"}
"""Run in `lower`: matrix products."""

HIGHER = aten(
    """_fused_rms_norm _log_softmax _softmax acos asin binary_cross_entropy
    binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
    cross_entropy_loss cumprod cumsum erfinv exp expm1 group_norm hinge_embedding_loss
    huber_loss kl_div l1_loss layer_norm linalg_vector_norm log log10 log1p log2 log_softmax.int
    logcumsumexp logsumexp margin_ranking_loss mean mean.dim mse_loss native_group_norm
    native_layer_norm nll_loss nll_loss2d nll_loss_nd norm.Scalar norm.ScalarOpt_dim
    pairwise_distance poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod
    prod.dim_int reciprocal rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax.int
    softplus std.correction std.dim sum sum.dim_IntList tan triplet_margin_loss var.correction
    var.dim var_mean.correction"""
)
"""Run in float32: reductions, norms, losses and what has a large range."""

WIDEST = aten(
    """_trilinear addcdiv addcmul atan2 bucketize.Tensor cat copy dot grid_sampler
    grid_sampler_2d index_add index_copy index_put lerp.Scalar lerp.Tensor masked_scatter
    scatter.src scatter_add scatter_reduce.two select_scatter slice_scatter stack"""
)
"""Take one dtype for all arguments: the widest among them."""


def mixed(graph: Graph, batch: int, lower: str = "bfloat16") -> Graph:
    """The float32 graph with the casts of mixed precision; unbound as before. `batch`: any
    microbatch size, to infer dtypes at. `lower`: what matrix products run in. Names of the
    operators stay; casts are NAME_cast0, …"""
    bound = graph.bind(batch)
    known = outside(bound)
    specs = dict(graph.spec)
    made: list[Operator] = []
    for op in graph.operators:
        floats = {known[v][0].dtype for v in op.reads if known[v][0].is_floating}
        wanted = ""
        if op.target in LOWER and floats <= {"float32", lower}:
            wanted = lower
        elif op.target in HIGHER or (op.target in WIDEST and len(floats) > 1):
            wanted = "float32"
        casts, op = _cast_args(op, wanted, lower, known, specs) if wanted else ((), op)
        for cast in casts:
            known |= dict(infer_operator(_bound(cast, batch), known))
        known |= dict(infer_operator(_bound(op, batch), known))
        made += [*casts, _with_dtypes(op, known)]
    graph = replace(graph, operators=tuple(made))
    return _float32_results(graph, known)


def _bound(op: Operator, batch: int) -> Operator:
    return Graph((), (), (), (op,), "").bind(batch).operators[0]


def cast_of(name: str, value: str, dtype: str, spec: TensorSpec, module: str) -> Operator:
    """The operator `name` that casts a value of this spec."""
    return Operator(
        name=name,
        target="aten._to_copy.default",
        args=(Ref(value),),
        kwargs=(("dtype", Dtype(dtype)),),
        outputs=(Output(replace(spec, dtype=dtype)),),
        module=module,
    )


def _cast_args(
    op: Operator, dtype: str, lower: str, known: Inferred, specs: dict[str, TensorSpec]
) -> tuple[tuple[Operator, ...], Operator]:
    """The casts that an operator needs before it, and the operator that reads them."""
    casts: dict[str, Operator] = {}

    def change(arg: Arg) -> Arg:
        if not isinstance(arg, Ref):
            return arg
        spec = known[arg.value][0]
        if spec.dtype == dtype or spec.dtype not in ("float32", lower):
            return arg
        if arg.value not in casts:
            name = f"{op.name}_cast{len(casts)}"
            casts[arg.value] = cast_of(name, arg.value, dtype, specs[arg.value], op.module)
        return Ref(casts[arg.value].name)

    op = op.mapped(change)
    return tuple(casts.values()), op


def _with_dtypes(op: Operator, known: Inferred) -> Operator:
    return replace(
        op,
        outputs=tuple(
            replace(o, spec=o.spec and replace(o.spec, dtype=known[v][0].dtype))
            for v, o in zip(op.values, op.outputs, strict=True)
        ),
    )


def _float32_results(graph: Graph, known: Inferred) -> Graph:
    casts: dict[str, Operator] = {}
    for value in (graph.loss, graph.weight, *(v for _, v in graph.metrics)):
        if value and known[value][0].dtype != "float32" and value not in casts:
            name = f"{value.replace('.', '_')}_float32"
            casts[value] = cast_of(name, value, "float32", graph.spec[value], "")
    operators = (*graph.operators, *casts.values())
    return replace(graph.giving({v: c.name for v, c in casts.items()}), operators=operators)


# What parameters are kept in between their uses (`frozen_dtype`, `trained_dtype` of a job).
#
# Under mixed precision the products read bfloat16 whatever a weight is kept in, so one that is kept
# in bfloat16 needs no cast there. Everything else goes on in what the module was written for: norms
# and reductions get their casts from `precision.py`, an embedding's rows are cast behind it, and
# what is left reads a cast of its own.

_ROWS = "aten.embedding.default"


@dataclass(frozen=True, slots=True)
class KeptDtypes:
    """Dtypes of float32 parameters, frozen and trained; "": as they are."""

    frozen: str = ""
    trained: str = ""

    def applied(self, graph: Graph) -> Graph:
        """The graph before `mixed`, unbound as before; the numbers of its operators change."""
        changed = {
            f"param:{p.name}": dtype
            for p in graph.parameters
            if (dtype := self.trained if p.trainable else self.frozen) and p.spec.dtype == "float32"
        }
        if not changed:
            return graph
        made: list[Operator] = []
        for op in graph.operators:
            made += _read(op, changed, graph)
        parameters = tuple(
            replace(p, spec=replace(p.spec, dtype=changed.get(f"param:{p.name}", p.spec.dtype)))
            for p in graph.parameters
        )
        return replace(graph, parameters=parameters, operators=tuple(made))


AS_MADE = KeptDtypes()


def _read(op: Operator, changed: dict[str, str], graph: Graph) -> list[Operator]:
    """An operator, with the casts that it needs for parameters which are kept in another dtype."""
    mine = [value for value in op.reads if value in changed]
    if not mine or op.target in LOWER | HIGHER:
        return [op]
    if op.target == _ROWS:
        (output,) = op.outputs
        assert output.spec is not None, "an embedding has a result"
        rows = Output(replace(output.spec, dtype=changed[mine[0]]), output.grad)
        name = f"{op.name}_kept"
        back = replace(
            cast_of(op.name, name, "float32", output.spec, op.module), outputs=op.outputs
        )
        return [replace(op, name=name, outputs=(rows,)), back]
    casts = {
        value: cast_of(f"{op.name}_kept{i}", value, "float32", graph.spec[value], op.module)
        for i, value in enumerate(mine)
    }
    return [*casts.values(), op.renamed({v: c.name for v, c in casts.items()})]
