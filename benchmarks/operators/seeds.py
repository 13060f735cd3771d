"""Calls that each operator takes, from which the fuzzer starts: part of
benchmarks/operators/fuzz.py.

Every operator on the allow-lists has one or more here
(`tests/hostile/operators/test_every_operator.py` counts them), so whoever adds an operator adds a
line. Shapes are small, and sizes that mean different things differ, so that a kernel which confuses
two of them is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.dag.ir.graph import Device, Dtype, MemoryFormat

__all__ = ["SEEDS", "Like"]


@dataclass(frozen=True)
class Like:
    """A tensor argument: its shape, dtype, layout and what is in it. `high`: integers are drawn
    from [0, high); `layout` and `values` are explained in cases.py."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int = 3
    layout: str = "plain"
    values: str = "normal"


def f(*shape: int) -> Like:
    return Like(shape)


def i(*shape: int, high: int = 3) -> Like:
    return Like(shape, "int64", high)


def b(*shape: int) -> Like:
    return Like(shape, "bool")


Seed = tuple[Any, ...]
"""Positional arguments; a dict at the end has the keyword arguments."""

SEEDS: dict[str, list[Seed]] = {}


def _same(names: str, *seeds: Seed) -> None:
    for name in names.split():
        full = name if name.count(".") == 2 else f"aten.{name}"
        full = full if full.count(".") == 2 else f"{full}.default"
        SEEDS.setdefault(full, []).extend(seeds)


_same(
    """abs acos acosh asin asinh atan atanh ceil cos cosh elu erf erfc exp exp2 expm1 floor gelu
    hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log log10 log1p log2 logical_not
    neg reciprocal relu relu6 round rsqrt selu sigmoid sign sgn silu mish sin sinh softplus sqrt
    square tan tanh trunc log_sigmoid softshrink hardshrink nan_to_num erfinv special_expm1
    log_sigmoid_forward lgamma digamma alias clone contiguous detach lift_fresh_copy tril triu all
    amax amin any argmax argmin max mean min prod sum norm.Scalar linalg_vector_norm argsort sort
    var.correction std.correction var_mean.correction std_mean.correction any.dims zeros_like
    ones_like _to_copy to.dtype_layout diff squeeze""",
    (f(3, 4),),
)
_same("flatten.using_ints diagonal diagonal_copy diag_embed", (f(2, 3, 4),))
_same("glu", (f(3, 4),), (f(2, 3, 4), -1))
_same("bitwise_not", (i(3, 4),), (b(3, 4),))
_same(
    """add.Tensor atan2 div.Tensor eq.Tensor floor_divide fmod.Tensor ge.Tensor gt.Tensor le.Tensor
    logaddexp logaddexp2 lt.Tensor maximum minimum mul.Tensor ne.Tensor pow.Tensor_Tensor
    remainder.Tensor rsub.Tensor sub.Tensor xlogy.Tensor true_divide.Tensor hypot copysign.Tensor
    clamp_max.Tensor clamp_min.Tensor max.other min.other logical_and logical_or logical_xor
    clamp.Tensor mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div
    hinge_embedding_loss""",
    (f(3, 4), f(3, 4)),
    (f(2, 3, 4), f(3, 1)),
)
_same("div.Tensor_mode", (f(3, 4), f(4), {"rounding_mode": "floor"}))
_same("div.Scalar_mode", (f(3, 4), 2, {"rounding_mode": "trunc"}))
_same(
    """bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor
    __xor__.Tensor""",
    (i(3, 4), i(4)),
    (b(3, 4), b(3, 1)),
)
_same(
    """bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar
    __xor__.Scalar""",
    (i(3, 4), 2),
)
_same(
    """add.Scalar div.Scalar eq.Scalar fmod.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar
    mul.Scalar ne.Scalar pow.Tensor_Scalar remainder.Scalar rsub.Scalar sub.Scalar clamp clamp_max
    clamp_min full_like fill.Scalar""",
    (f(3, 4), 2.5),
    (i(3, 4), 2),
)
_same("pow.Scalar", (2.0, f(3, 4)))
_same("lerp.Scalar", (f(3, 4), f(3, 4), 0.3))
_same("lerp.Tensor addcmul addcdiv", (f(3, 4), f(3, 4), f(3, 4)), (f(3, 4), f(4), f(3, 1)))
_same("masked_fill.Scalar", (f(3, 4), b(3, 4), 1.5), (f(2, 3, 4), b(4), 0))
_same("masked_fill.Tensor", (f(3, 4), b(3, 4), f()))
_same("prelu", (f(2, 3, 4), f(3)), (f(3, 4), f(1)))
_same("_prelu_kernel", (f(2, 3, 4), f(1, 3, 1)), (f(3, 4), f(1, 4)))
_same("where.self", (b(3, 4), f(3, 4), f(4)))
_same("where.ScalarOther", (b(3, 4), f(3, 4), 2.0))
_same("where.ScalarSelf", (b(3, 4), 2.0, f(3, 4)))
_same("where.Scalar", (b(3, 4), 1.0, 2.0))
_same("threshold", (f(3, 4), 0.1, 0.5))
_same("fill.Tensor", (f(3, 4), f()))

_same("_reshape_alias", (f(2, 6), (3, 4), (4, 1)))
_same("_unsafe_view view reshape", (f(2, 6), (3, 4)), (f(2, 3, 4), (6, -1)))
_same("broadcast_tensors", ((f(3, 1), f(4)),))
_same("broadcast_to expand", (f(3, 1), (2, 3, 4)))
_same("cat", ((f(3, 4), f(2, 4)),), ((f(3, 4), f(3, 2)), 1))
_same("stack", ((f(3, 4), f(3, 4)),), ((f(3, 4), f(3, 4)), -1))
_same("chunk unsafe_chunk tensor_split.sections", (f(6, 4), 3), (f(4, 6), 2, 1))
_same("expand_as view_as type_as", (f(3, 4), f(3, 4)))
_same("flip", (f(3, 4), (0, 1)))
_same("movedim.int swapaxes transpose.int", (f(2, 3, 4), 0, 2))
_same("movedim.intlist", (f(2, 3, 4), (0, 1), (2, 0)))
_same("narrow", (f(3, 4), 1, 1, 2))
_same("permute", (f(2, 3, 4), (2, 0, 1)))
_same("repeat", (f(3, 4), (2, 1, 2)))
_same("repeat_interleave.self_int", (f(3, 4), 2), (f(3, 4), 2, 1))
_same("roll", (f(3, 4), (1, 2), (0, 1)), (f(3, 4), (2,)))
_same("select.int", (f(3, 4), 1, 2))
_same("slice.Tensor", (f(3, 8), 1, 1, 7, 2))
_same("split.Tensor split_copy.Tensor unsafe_split.Tensor", (f(6, 4), 2), (f(3, 5), 2, 1))
_same("split.sizes split_with_sizes unsafe_split_with_sizes", (f(6, 4), (1, 2, 3)))
_same("squeeze.dim unsqueeze", (f(3, 1, 4), 1))
_same("squeeze.dims", (f(3, 1, 1), (1, 2)))
_same("t", (f(3, 4),))
_same("unbind.int", (f(3, 4),), (f(2, 3, 4), 1))
_same("unflatten.int", (f(3, 6), 1, (2, 3)))
_same("unfold", (f(3, 8), 1, 3, 2))
_same("constant_pad_nd", (f(3, 4), (1, 2, 0, 1), 1.5))
_same(
    "pad",
    (f(3, 4), (1, 2)),
    (f(2, 3, 4, 5), (1, 2, 1, 1), "reflect"),
    (f(2, 3, 4, 5), (1, 2, 1, 1), "circular"),
    (f(2, 3, 4), (2, 1), "replicate"),
)
_same("to.dtype", (f(3, 4), Dtype("float64")))
_same("view.dtype", (f(3, 4), Dtype("int32")), (f(3, 4), Dtype("int16")))
_same("to.device", (f(3, 4), Device(), Dtype("float16")))
_same("reflection_pad1d replication_pad1d", (f(2, 3, 5), (1, 2)), (f(3, 5), (2, -1)))
_same("reflection_pad2d replication_pad2d", (f(2, 3, 4, 5), (1, 2, 1, 0)), (f(3, 4, 5), (1,) * 4))
_same("pixel_shuffle", (f(2, 8, 3, 5), 2))
_same("pixel_unshuffle", (f(2, 3, 4, 6), 2))
_same("select_scatter", (f(3, 4), f(3), 1, 2))
_same("slice_scatter", (f(3, 8), f(3, 3), 1, 1, 7, 2))

_same(
    "embedding", (f(7, 4), i(2, 3, high=7)), (f(7, 4), i(5, high=7), 2, True), (f(7, 4), i(high=7))
)
_same("gather", (f(3, 4), 1, i(3, 2, high=4)), (f(3, 4), 0, i(2, 4, high=3)))
_same("take_along_dim", (f(3, 4), i(3, 2, high=4), 1), (f(3, 4), i(5, high=12)))
_same(
    "index.Tensor _unsafe_index.Tensor",
    (f(5, 4), (i(3, high=5),)),
    (f(5, 4), (i(3, high=5), i(3, high=4))),
    (f(5, 4, 3), (None, i(2, 3, high=4))),
)
_same(
    "index_add index_copy", (f(5, 4), 0, i(3, high=5), f(3, 4)), (f(5, 4), 1, i(2, high=4), f(5, 2))
)
_same(
    "index_put _unsafe_index_put",
    (f(5, 4), (i(3, high=5),), f(3, 4)),
    (f(5, 4), (i(3, high=5), i(3, high=4)), f(3), True),
    (f(5, 4), (None, i(3, high=4)), f()),
)
_same("index_select", (f(5, 4), 0, i(3, high=5)), (f(5, 4), 1, i(3, high=4)))
_same("index_fill.int_Scalar", (f(5, 4), 0, i(3, high=5), 1.5))
_same("one_hot", (i(3, 4, high=5), 5))
_same(
    "scatter.src scatter_add",
    (f(3, 4), 1, i(3, 2, high=4), f(3, 2)),
    (f(3, 4), 0, i(2, 4), f(2, 4)),
)
_same("scatter.value", (f(3, 4), 1, i(3, 2, high=4), 1.5))
_same(
    "scatter_reduce.two",
    *(
        (f(3, 4), 1, i(3, 2, high=4), f(3, 2), how)
        for how in ("sum", "prod", "mean", "amax", "amin")
    ),
)
_same("sort", (f(3, 4), 0, True))
_same("sort.stable", (f(3, 4), {"stable": True, "dim": 0}))
_same("topk", (f(3, 5), 2), (f(5, 3), 2, 0, False))
_same("argsort cummax cummin logcumsumexp cumsum cumprod", (f(3, 4), 1))
_same("masked_scatter", (f(3, 4), b(3, 4), f(12)))
_same("masked_select_backward", (f(12), f(3, 4), b(3, 4)))
_same("bucketize.Tensor", (f(3, 4), f(5)))
_same("searchsorted.Tensor", (f(5), f(3, 4)), (f(3, 5), f(3, 2), {"sorter": i(3, 5, high=5)}))
_same("kthvalue", (f(3, 5), 2), (f(5, 3), 2, 0, True))
_same("median.dim", (f(3, 5), 1))

_same("arange", (6,))
_same("arange.start", (1, 6))
_same("arange.start_step", (1, 9, 2), (0.0, 1.0, 0.3))
_same("eye", (4,))
_same("eye.m", (3, 4))
_same("full", ((3, 4), 2.5))
_same("linspace", (0.0, 1.0, 5))
_same("new_full", (f(2), (3, 4), 2))
_same("new_ones new_zeros", (f(2), (3, 4)))
_same("ones zeros", ((3, 4),))
_same("scalar_tensor", (2.5,))
_same("tril_indices triu_indices", (3, 4), (3, 5, 1))

_same("all.dim any.dim max.dim min.dim prod.dim_int", (f(3, 4), 1))
_same("amax amin mean.dim sum.dim_IntList std.dim var.dim", (f(2, 3, 4), (1, 2)))
_same("logsumexp", (f(2, 3, 4), (0, 2)))
_same("norm.ScalarOpt_dim", (f(2, 3, 4), 2, (1,)))
_same("linalg_vector_norm", (f(2, 3, 4), 3, (1,)))

_same("addbmm", (f(3, 5), f(2, 3, 4), f(2, 4, 5)))
_same("addmm", (f(3, 5), f(3, 4), f(4, 5)), (f(5), f(3, 4), f(4, 5)))
_same("baddbmm", (f(2, 3, 5), f(2, 3, 4), f(2, 4, 5)))
_same("bmm", (f(2, 3, 4), f(2, 4, 5)))
_same("dot", (f(5), f(5)))
_same(
    "einsum",
    ("ij,jk->ik", (f(3, 4), f(4, 5))),
    ("bij,bjk,bk->bi", (f(2, 3, 4), f(2, 4, 5), f(2, 5))),
    ("...i,...i->...", (f(2, 3, 4), f(4))),
    ("ii->i", (f(3, 3),)),
)
_same("linear", (f(3, 4), f(5, 4), f(5)), (f(2, 3, 4), f(5, 4)))
_same("matmul", (f(2, 3, 4), f(4, 5)), (f(3, 4), f(4)), (f(2, 1, 3, 4), f(5, 4, 3)))
_same("mm", (f(3, 4), f(4, 5)))
_same("mv", (f(3, 4), f(4)))
_same("outer", (f(3), f(4)))
_same("addmv", (f(3), f(3, 4), f(4)))
_same("bilinear", (f(2, 3), f(2, 4), f(5, 3, 4), f(5)))
_same("_trilinear", (f(2, 3), f(5, 3, 4), f(2, 4), (1, 3), (0,), (1, 2), (2, 3), 1))
_same("conv1d", (f(2, 4, 9), f(6, 2, 3), f(6), (2,), (1,), (2,), 2), (f(2, 3, 7), f(5, 3, 2)))
_same(
    "conv2d",
    (f(2, 4, 7, 8), f(6, 2, 3, 2), f(6), (2, 1), (1, 0), (1, 2), 2),
    (f(2, 3, 5, 6), f(4, 3, 3, 3)),
)
_same("conv3d", (f(1, 2, 4, 5, 6), f(3, 2, 2, 2, 3), f(3), (1, 2, 1), (1, 0, 1)))
_same("conv1d.padding", (f(2, 4, 9), f(6, 2, 3), f(6), (1,), "same", (1,), 2))
_same("conv2d.padding", (f(2, 4, 7, 8), f(6, 2, 3, 3), f(6), (1, 1), "same", (1, 1), 2))
_same("conv_transpose1d", (f(2, 4, 5), f(4, 3, 3), f(6), (2,), (1,), (1,), 2, (1,)))
_same(
    "conv_transpose2d.input",
    (f(2, 4, 3, 5), f(4, 3, 3, 2), f(6), (2, 3), (1, 0), (1, 2), 2, (1, 1)),
)
_same("conv_transpose3d.input", (f(1, 2, 3, 4, 2), f(2, 3, 2, 3, 2), f(3), (2, 1, 1)))
_same(
    "convolution",
    (f(2, 4, 7, 8), f(6, 2, 3, 2), f(6), (2, 1), (1, 0), (1, 2), False, (0, 0), 2),
    (f(2, 4, 3, 5), f(4, 3, 3, 2), None, (2, 3), (1, 0), (1, 1), True, (1, 2), 2),
    (f(2, 3, 7), f(5, 3, 2), f(5), (1,), (0,), (1,), False, (0,), 1),
)
_same("linalg_cross", (f(4, 3), f(4, 3)), (f(3, 4), f(3, 1), {"dim": 0}))
_same("_weight_norm", (f(3, 4, 2), f(3, 1, 1)), (f(3, 4), f(1, 4), 1))
_same("_weight_norm_interface", (f(3, 4, 2), f(3, 1, 1)), (f(3, 4), f(1, 4), 1))

_same(
    "_native_batch_norm_legit_functional",
    (f(2, 3, 4, 5), f(3), f(3), f(3), f(3), True, 0.1, 1e-5),
    (f(4, 3), None, None, f(3), f(3), False, 0.1, 1e-5),
)
_same(
    "_native_batch_norm_legit_no_training",
    (f(2, 3, 4), f(3), f(3), f(3), f(3), 0.1, 1e-5),
    (f(4, 3), None, f(3), f(3), f(3), 0.1, 1e-5),
)
_same(
    "_native_batch_norm_legit.no_stats",
    (f(2, 3, 4), f(3), f(3), True, 0.1, 1e-5),
    (f(4, 3), f(3), None, True, 0.1, 1e-5),
)
_same("_softmax _log_softmax", (f(2, 3, 4), 1, False))
_same("softmax.int log_softmax.int", (f(2, 3, 4), 1))
_same("layer_norm", (f(2, 3, 4), (3, 4), f(3, 4), f(3, 4)), (f(2, 4), (4,)))
_same(
    "native_layer_norm",
    (f(2, 3, 4), (3, 4), f(3, 4), f(3, 4), 1e-5),
    (f(2, 4), (4,), None, None, 1e-5),
)
_same("group_norm", (f(2, 6, 4, 5), 3, f(6), f(6)), (f(2, 6), 2))
_same(
    "native_group_norm",
    (f(2, 6, 4, 5), f(6), f(6), 2, 6, 20, 3, 1e-5),
    (f(2, 6, 4), None, f(6), 2, 6, 4, 2, 1e-5),
)
_same(
    "instance_norm",
    (f(2, 3, 4, 5), f(3), f(3), None, None, True, 0.1, 1e-5, False),
    (f(2, 3, 4), None, None, None, None, True, 0.1, 1e-5, False),
    (f(2, 3, 4), None, None, f(3), f(3), False, 0.1, 1e-5, False),
)
_same("rms_norm _fused_rms_norm", (f(2, 3, 4), (3, 4), f(3, 4), 1e-5), (f(2, 4), (4,), None, None))
_same(
    "scaled_dot_product_attention",
    (f(2, 3, 5, 4), f(2, 3, 6, 4), f(2, 3, 6, 4)),
    (f(2, 3, 5, 4), f(2, 3, 6, 4), f(2, 3, 6, 4), f(5, 6)),
    (f(2, 3, 5, 4), f(2, 3, 6, 4), f(2, 3, 6, 4), b(2, 1, 5, 6)),
    (f(2, 3, 5, 4), f(2, 3, 5, 4), f(2, 3, 5, 4), None, 0.0, True),
    (f(2, 4, 5, 4), f(2, 2, 6, 4), f(2, 2, 6, 7), {"enable_gqa": True, "scale": 0.3}),
)
_same("avg_pool1d", (f(2, 3, 9), (3,), (2,), (1,)))
_same("avg_pool2d", (f(2, 3, 7, 8), (3, 2), (2, 1), (1, 0), True, False, 5), (f(3, 6, 7), (2, 2)))
_same("avg_pool3d", (f(2, 2, 4, 5, 6), (2, 2, 3), (1, 2, 1), (1, 0, 1), True, False))
_same("max_pool1d", (f(2, 3, 9), (3,), (2,), (1,), (2,), True))
_same(
    "max_pool2d max_pool2d_with_indices",
    (f(2, 3, 7, 8), (3, 2), (2, 1), (1, 0), (1, 2), True),
    (f(3, 6, 7), (2, 2)),
)
_same("max_pool3d", (f(2, 2, 4, 5, 6), (2, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), True))
_same("adaptive_avg_pool1d", (f(2, 3, 7), (3,)))
_same("adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d", (f(2, 3, 7, 8), (3, 4)))
_same("_adaptive_avg_pool3d", (f(2, 3, 4, 5, 6), (2, 3, 4)))
_same("upsample_nearest1d", (f(2, 3, 5), (8,), 1.6), (f(2, 3, 5), (8,)))
_same("upsample_nearest1d.vec", (f(2, 3, 5), (8,), None), (f(2, 3, 5), None, (1.6,)))
_same("upsample_nearest2d", (f(2, 3, 4, 5), (6, 8), 1.5, 1.6), (f(2, 3, 4, 5), (6, 8)))
_same("upsample_nearest2d.vec", (f(2, 3, 4, 5), (6, 8), None), (f(2, 3, 4, 5), None, (1.5, 1.6)))
_same(
    "upsample_bilinear2d upsample_bicubic2d",
    (f(2, 3, 4, 5), (6, 8), False, 1.5, 1.6),
    (f(2, 3, 4, 5), (6, 8), True),
)
_same(
    "upsample_bilinear2d.vec upsample_bicubic2d.vec",
    (f(2, 3, 4, 5), (6, 8), True, None),
    (f(2, 3, 4, 5), None, False, (1.5, 1.6)),
)
_same(
    "grid_sampler",
    (f(2, 3, 4, 5), f(2, 6, 7, 2), 0, 0, False),
    (f(2, 3, 4, 5, 6), f(2, 3, 2, 2, 3), 1, 1, True),
)
_same(
    "grid_sampler_2d",
    *((f(2, 3, 4, 5), f(2, 6, 7, 2), how, pad, False) for how in (0, 1, 2) for pad in (0, 1, 2)),
)
_same("im2col", (f(2, 3, 6, 7), (2, 3), (1, 2), (1, 0), (2, 1)))
_same("col2im", (f(2, 18, 8), (6, 7), (2, 3), (1, 2), (1, 0), (2, 2)))


def _layer(
    gates: int, inputs: int, hidden: int, layers: int, ways: int, bias: bool
) -> tuple[Like, ...]:
    """The weights of a recurrent layer, as torch.nn has them."""
    found: list[Like] = []
    for layer in range(layers):
        wide = inputs if layer == 0 else hidden * ways
        for _ in range(ways):
            found += [f(gates * hidden, wide), f(gates * hidden, hidden)]
            found += [f(gates * hidden)] * 2 if bias else []
    return tuple(found)


for _name, _gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
    _same(
        f"{_name}.input",
        (f(5, 2, 3), f(4, 2, 4), _layer(_gates, 3, 4, 2, 2, True), True, 2, 0.0, True, True, False),
        (
            f(2, 5, 3),
            f(1, 2, 4),
            _layer(_gates, 3, 4, 1, 1, False),
            False,
            1,
            0.0,
            False,
            False,
            True,
        ),
    )
_same(
    "lstm.input",
    (
        f(5, 2, 3),
        (f(4, 2, 4), f(4, 2, 4)),
        _layer(4, 3, 4, 2, 2, True),
        True,
        2,
        0.0,
        True,
        True,
        False,
    ),
    (
        f(2, 5, 3),
        (f(1, 2, 4), f(1, 2, 4)),
        _layer(4, 3, 4, 1, 1, False),
        False,
        1,
        0.0,
        False,
        False,
        True,
    ),
    (  # with a projection of the hidden state to two
        f(5, 2, 3),
        (f(1, 2, 2), f(1, 2, 4)),
        (f(16, 3), f(16, 2), f(16), f(16), f(2, 4)),
        *(True, 1, 0.0, False, False, False),
    ),
)
_same("lstm_cell", (f(2, 3), (f(2, 4), f(2, 4)), f(16, 3), f(16, 4), f(16), f(16)))
_same("gru_cell", (f(2, 3), f(2, 4), f(12, 3), f(12, 4), f(12), f(12)))
_same("cosine_similarity pairwise_distance", (f(3, 4), f(3, 4)))
_same("cdist", (f(2, 3, 4), f(2, 5, 4)), (f(3, 4), f(5, 4), 1.0))
_same(
    "cross_entropy_loss",
    (f(5, 4), i(5, high=4), f(4), 1, 2, 0.1),
    (f(2, 4, 3), i(2, 3, high=4)),
    (f(5, 4), f(5, 4), None, 2),
)
_same("nll_loss nll_loss_nd", (f(5, 4), i(5, high=4), f(4)), (f(5, 4), i(5, high=4), None, 0))
_same("nll_loss_forward", (f(5, 4), i(5, high=4), f(4), 1, -100), (f(4), i(high=4), None, 2, 1))
_same(
    "nll_loss2d",
    (f(2, 4, 3, 5), i(2, 3, 5, high=4), f(4)),
    (f(2, 4, 3, 5), i(2, 3, 5, high=4), None, 0),
)
_same("nll_loss_nd", (f(2, 4, 3, 5), i(2, 3, 5, high=4), f(4)))
_same(
    "nll_loss2d_forward",
    (f(2, 4, 3, 5), i(2, 3, 5, high=4), f(4), 1, -100),
    (f(2, 4, 3, 5), i(2, 3, 5, high=4), None, 0, 1),
)
_same("binary_cross_entropy", (Like((3, 4), values="unit"), Like((3, 4), values="unit"), f(4)))
_same("binary_cross_entropy_with_logits", (f(3, 4), f(3, 4), f(4), f(3, 4), 2))
_same("cosine_embedding_loss", (f(5, 4), f(5, 4), f(5)))
_same("triplet_margin_loss", (f(5, 4), f(5, 4), f(5, 4)))
_same("margin_ranking_loss", (f(5), f(5), f(5)))
_same("poisson_nll_loss", (f(3, 4), f(3, 4), True, True, 1e-8, 1))

_same("shoal.dropout.default shoal.feature_dropout.default", (f(2, 3, 4), 0.3, 0))
_same("shoal.bernoulli_like.default", (Like((3, 4), values="unit"), 0))
_same("shoal.bernoulli.default", ((3, 4), 0.3, 0, {"dtype": Dtype("float32"), "device": Device()}))
_same(
    "shoal.rand.default shoal.randn.default",
    ((3, 4), 0, {"dtype": Dtype("float32"), "device": Device()}),
)
_same(
    "shoal.exponential.default", ((3, 4), 1.5, 0, {"dtype": Dtype("float32"), "device": Device()})
)
_same(
    "shoal.attention.default",
    (f(2, 3, 5, 4), f(2, 3, 6, 4), f(2, 3, 6, 4), None, 0.2, False, None, False, 0),
    (f(2, 3, 5, 4), f(2, 3, 6, 4), f(2, 3, 6, 4), b(2, 1, 5, 6), 0.2, True, 0.5, False, 0),
    (f(2, 4, 5, 4), f(2, 2, 6, 4), f(2, 2, 6, 7), f(5, 6), 0.2, False, None, True, 0),
)
_same("shoal.grouped_mm.default", (f(6, 4), f(3, 4, 5), i(3, high=7)), (f(2, 4), f(1, 4, 5), i(1)))
_same(
    "shoal.int8_linear.default",
    (f(2, 4), Like((3, 4), "int8"), f(3, 1), f(3)),
    (f(5, 2, 4), Like((4, 3), "int8"), f(1, 3)),
)
_same(
    "shoal.int8_grouped_mm.default",
    (f(6, 4), Like((3, 4, 5), "int8"), f(3, 1, 5), i(3, high=7)),
    (f(6, 4), Like((3, 5, 4), "int8"), f(3, 5, 1), i(3, high=7)),
)
_same("shoal.int8_embedding.default", (Like((6, 4), "int8"), f(6, 1), i(2, 3, high=6)))
_same("shoal.histogram.default", (f(5, 4), 8, -1.0, 1.0), (i(7, high=4), 4, 0.0, 3.0))
_same(
    "clone contiguous _to_copy", (f(2, 3, 4, 5), {"memory_format": MemoryFormat("channels_last")})
)
