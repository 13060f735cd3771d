"""Which operators a graph may contain, and the function behind each name (I7).

The lists are explicit: an operator that is not named here is refused before anything is built, so
that no graph from elsewhere reaches an operator that touches files, runs code, changes its
arguments or returns uninitialised memory. `full` is what a capture yields, `core` what the
lowering of `dag/transforms/lower.py` yields; `core` trains, that is, autograd can differentiate
each operator. This module imports torch only when a name is resolved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

__all__ = [
    "CORE",
    "FULL",
    "POINTWISE",
    "OperatorError",
    "allowed",
    "aten",
    "check",
    "is_own",
    "resolve",
    "takes_key",
]

Set = Literal["full", "core"]


class OperatorError(ValueError):
    """An operator that is not on the allow-list; the message names it and says what to do."""


def aten(*groups: str) -> frozenset[str]:
    """`aten.NAME.OVERLOAD` for every word; a word without a dot means the overload `default`."""
    words = " ".join(groups).split()
    return frozenset(f"aten.{w}" if "." in w else f"aten.{w}.default" for w in words)


RANDOM = frozenset(
    f"shoal.{name}.default"
    for name in (
        "dropout",
        "feature_dropout",
        "attention",
        "bernoulli",
        "bernoulli_like",
        "rand",
        "randn",
        "exponential",
    )
)
"""Shoal's own: random operators whose masks are counter-based (dag/ir/random.py)."""

EXPERTS = frozenset(
    f"shoal.{name}.default" for name in ("grouped_mm", "int8_grouped_mm", "histogram")
)
"""Shoal's own: the routing of mixtures of experts, in place of kernels that trust the offsets they
are given (dag/ir/experts.py)."""

QUANTIZED = frozenset({"shoal.int8_linear.default", "shoal.int8_embedding.default"})
"""Shoal's own: what reads frozen weights in 8 bits (dag/ir/quantized.py)."""

_POINTWISE = """
abs acos acosh add.Tensor add.Scalar asin asinh atan atanh atan2 bitwise_and.Tensor
bitwise_and.Scalar bitwise_not bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor
bitwise_xor.Scalar ceil clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor
cos cosh div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode elu eq.Tensor eq.Scalar erf erfc
exp exp2 expm1 floor floor_divide fmod.Tensor fmod.Scalar ge.Tensor ge.Scalar gelu gt.Tensor
gt.Scalar hardsigmoid hardswish hardtanh isfinite isinf isnan le.Tensor le.Scalar leaky_relu
lerp.Scalar lerp.Tensor log log10 log1p log2 logaddexp logical_and logical_not logical_or
logical_xor lt.Tensor lt.Scalar masked_fill.Scalar masked_fill.Tensor maximum minimum mul.Tensor
mul.Scalar ne.Tensor ne.Scalar neg pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prelu
reciprocal relu relu6 remainder.Tensor remainder.Scalar round rsqrt rsub.Scalar rsub.Tensor selu
sigmoid sign sgn silu mish sin sinh softplus sqrt square sub.Tensor sub.Scalar tan tanh trunc
where.self where.ScalarOther where.ScalarSelf where.Scalar threshold log_sigmoid softshrink
hardshrink addcmul addcdiv nan_to_num xlogy.Tensor erfinv glu true_divide.Tensor special_expm1
_prelu_kernel log_sigmoid_forward __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar
__xor__.Tensor __xor__.Scalar hypot copysign.Tensor lgamma digamma logaddexp2
"""

_SHAPE = """
_reshape_alias _unsafe_view alias broadcast_tensors broadcast_to cat chunk clone contiguous detach
diagonal expand
expand_as flatten.using_ints flip lift_fresh_copy movedim.int movedim.intlist narrow permute
repeat repeat_interleave.self_int reshape roll select.int slice.Tensor split.Tensor split.sizes
split_with_sizes squeeze squeeze.dim squeeze.dims stack t transpose.int tril triu unbind.int
unflatten.int unfold unsqueeze view view_as constant_pad_nd pad _to_copy to.dtype to.dtype_layout
to.device type_as reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
pixel_shuffle pixel_unshuffle select_scatter slice_scatter diag_embed tensor_split.sections
swapaxes view.dtype unsafe_split.Tensor unsafe_chunk split_copy.Tensor unsafe_split_with_sizes
diagonal_copy
"""

_INDEX = """
embedding gather index.Tensor index_add index_put index_select one_hot scatter.src scatter.value
scatter_add scatter_reduce.two sort sort.stable topk argsort argmax argmin masked_scatter
take_along_dim bucketize.Tensor searchsorted.Tensor masked_select_backward _unsafe_index.Tensor
index_fill.int_Scalar index_copy _unsafe_index_put kthvalue
"""

_CREATE = """
arange arange.start arange.start_step eye eye.m full full_like linspace new_full new_ones
new_zeros ones ones_like scalar_tensor tril_indices triu_indices zeros zeros_like fill.Scalar
fill.Tensor
"""

_REDUCE = """
all all.dim amax amin any any.dim any.dims cummax cummin cumprod cumsum logcumsumexp logsumexp max
max.dim max.other diff mean mean.dim min min.dim min.other norm.Scalar norm.ScalarOpt_dim
linalg_vector_norm prod prod.dim_int std.correction std.dim sum sum.dim_IntList var.correction
var.dim var_mean.correction std_mean.correction median.dim
"""

_MATRIX = """
addbmm addmm baddbmm bmm dot einsum linear matmul mm mv outer addmv bilinear _trilinear
conv1d conv2d conv3d conv2d.padding conv1d.padding conv_transpose1d conv_transpose2d.input
convolution conv_transpose3d.input linalg_cross _weight_norm _weight_norm_interface
"""

_NETWORK = """
_native_batch_norm_legit_functional _native_batch_norm_legit_no_training
_native_batch_norm_legit.no_stats _softmax _log_softmax
softmax.int log_softmax.int layer_norm native_layer_norm group_norm native_group_norm
instance_norm rms_norm _fused_rms_norm scaled_dot_product_attention avg_pool1d avg_pool2d
avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_avg_pool1d
adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d
upsample_nearest1d.vec
upsample_nearest2d upsample_nearest2d.vec upsample_bilinear2d upsample_bilinear2d.vec
upsample_bicubic2d upsample_bicubic2d.vec upsample_nearest1d grid_sampler_2d grid_sampler im2col
col2im lstm.input gru.input rnn_tanh.input rnn_relu.input lstm_cell gru_cell cosine_similarity
pairwise_distance cdist mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy_loss
nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward binary_cross_entropy
binary_cross_entropy_with_logits kl_div soft_margin_loss cosine_embedding_loss
triplet_margin_loss margin_ranking_loss poisson_nll_loss hinge_embedding_loss
"""

POINTWISE = aten(_POINTWISE)
"""What works element by element on arguments that are broadcast."""

FULL = (
    aten(_POINTWISE, _SHAPE, _INDEX, _CREATE, _REDUCE, _MATRIX, _NETWORK)
    | RANDOM
    | EXPERTS
    | QUANTIZED
)
"""What a captured graph may contain."""

CORE = (
    aten(
        """
abs acos acosh add.Tensor add.Scalar asin asinh atan atanh atan2 bitwise_and.Tensor
bitwise_and.Scalar bitwise_not bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor
bitwise_xor.Scalar ceil clamp clamp.Tensor cos cosh div.Tensor div.Scalar div.Tensor_mode
div.Scalar_mode elu eq.Tensor eq.Scalar erf exp expm1 floor fmod.Tensor fmod.Scalar ge.Tensor
ge.Scalar gelu gt.Tensor gt.Scalar hardtanh isinf isnan le.Tensor le.Scalar leaky_relu log log10
log1p log2 logical_and logical_not logical_or logical_xor lt.Tensor lt.Scalar masked_fill.Scalar
maximum minimum mul.Tensor mul.Scalar ne.Tensor ne.Scalar neg pow.Scalar pow.Tensor_Scalar
pow.Tensor_Tensor reciprocal relu remainder.Tensor remainder.Scalar round rsqrt sigmoid sign sin
sinh sqrt sub.Tensor sub.Scalar tan tanh trunc where.self mul.Scalar add.Scalar
_unsafe_view alias cat clone diagonal expand flip permute repeat select.int slice.Tensor
split_with_sizes squeeze.dim squeeze.dims unsqueeze view constant_pad_nd _to_copy detach
reflection_pad1d reflection_pad2d replication_pad2d select_scatter slice_scatter t transpose.int
embedding gather index.Tensor index_add index_put index_select scatter.src scatter.value
scatter_add scatter_reduce.two sort topk argmax argmin masked_scatter
arange.start_step full full_like scalar_tensor
any any.dim any.dims amax amin cumsum linalg_vector_norm
max.dim mean mean.dim min.dim prod prod.dim_int sum
sum.dim_IntList var.correction var.dim
addmm bmm mm dot mv convolution
_native_batch_norm_legit_functional _native_batch_norm_legit_no_training
_native_batch_norm_legit.no_stats _softmax _log_softmax native_layer_norm native_group_norm
avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices _adaptive_avg_pool2d
upsample_nearest2d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_nearest2d
upsample_bilinear2d upsample_bicubic2d grid_sampler_2d col2im reshape
"""
    )
    | RANDOM
    | EXPERTS
    | QUANTIZED
)
"""Core ATen and Shoal's own: what the lowering yields, all of it differentiable."""


def allowed(target: str, operator_set: Set) -> bool:
    return target in (FULL if operator_set == "full" else CORE)


def check(target: str, operator_set: Set) -> None:
    """Raises OperatorError when the operator is not on the list."""
    if not allowed(target, operator_set):
        raise OperatorError(
            f"operator {target} is not on the {operator_set!r} allow-list, so no peer runs it: "
            "write the model with another operator (shoal.dag.ir.operators lists those allowed)"
        )


def is_own(target: str) -> bool:
    """Whether the operator is a function of Shoal's and has no schema of torch's."""
    return target.startswith("shoal.")


def takes_key(target: str) -> bool:
    """Whether the operator is random: it then takes a last keyword argument `key`, an int that the
    executor makes with `random.step_key(seed, step, microbatch)`."""
    return target in RANDOM


@cache
def resolve(target: str) -> Callable[..., Any]:
    """The function behind an allowed name; raises OperatorError for any other name."""
    if target not in FULL and target not in CORE:
        check(target, "full")
    namespace, name, overload = target.split(".")
    if namespace == "shoal":
        from . import experts, quantized, random

        return (random.OPERATORS | experts.OPERATORS | quantized.OPERATORS)[name]
    import torch

    try:
        found: Callable[..., Any] = getattr(getattr(torch.ops.aten, name), overload)
    except AttributeError:
        raise OperatorError(
            f"operator {target} is not part of torch {torch.__version__} here: "
            "capture the model with the torch version of the peers, or update this one"
        ) from None
    return found
