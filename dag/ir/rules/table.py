"""The table of `rules.py`: by operator, what its arguments must be (in the words of
words.py), how many results it gives, and how often a loop inside it runs. What goes over its
input by windows is in windows.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..graph import TensorSpec
from .words import (
    Given,
    Rule,
    adding_to,
    flag,
    integer,
    integers,
    need,
    rank,
    shaped,
    tensor,
    tensors,
)

__all__ = ["CHOICES", "RESULTS", "STEPS", "TABLE"]

TABLE: dict[str, Rule] = {}
"""By operator, what its arguments must be."""
_rule = adding_to(TABLE)

CHOICES: dict[str, tuple[Any, ...]] = {
    "reduction": (0, 1, 2),
    "interpolation_mode": (0, 1, 2),
    "padding_mode": (0, 1, 2),
}
"""Arguments of any operator that are one of few values, which kernels tell apart by `else`."""

RESULTS: dict[str, Callable[[Given], int]] = {}
"""Operators whose number of results depends on their arguments."""
STEPS: dict[str, Callable[[Given], int]] = {}
"""Operators that run a loop, on the host and on meta tensors too."""


def _size(given: Given) -> int:
    """The size of the dimension `dim` of `self`, a scalar's being 1."""
    sizes, dim = tensor(given, "self").sizes, integer(given, "dim")
    need(-len(sizes) <= dim < len(sizes), f"dim is {dim}: expected one of {len(sizes)} dimensions")
    return sizes[dim]


# ---------------------------------------------------------------- results and steps


def _pieces(given: Given) -> int:
    size = integer(given, "split_size", least=0)
    return -(-_size(given) // size) or 1 if size else 1


def _chunks(given: Given) -> int:
    size, chunks = _size(given), integer(given, "chunks", least=1)
    # Of nothing there are as many pieces as asked for.
    return -(-size // -(-size // chunks)) if size else chunks


RESULTS |= {
    "aten.unbind.int": _size,
    "aten.split.Tensor": _pieces,
    "aten.split_copy.Tensor": _pieces,
    "aten.unsafe_split.Tensor": _pieces,
    "aten.split.sizes": lambda g: len(integers(g, "split_size")),
    "aten.split_with_sizes.default": lambda g: len(integers(g, "split_sizes")),
    "aten.unsafe_split_with_sizes.default": lambda g: len(integers(g, "split_sizes")),
    "aten.chunk.default": _chunks,
    "aten.unsafe_chunk.default": _chunks,
    "aten.tensor_split.sections": lambda g: integer(g, "sections", least=1),
    "aten.broadcast_tensors.default": lambda g: len(tensors(g, "tensors")),
}


def _time_steps(given: Given) -> int:
    sizes = rank(tensor(given, "input"), "input", 3, 3)
    ways = 2 if flag(given, "bidirectional") else 1
    layers = integer(given, "num_layers", least=1)
    return sizes[1 if flag(given, "batch_first") else 0] * layers * ways


def _expert_slices(given: Given) -> int:
    experts, *sizes = rank(tensor(given, "weight"), "weight", 3, 3)
    return experts * _slices(sizes)


def _unrolled(given: Given) -> int:
    """`_trilinear` goes through one dimension of three tensors that are broadcast."""
    sizes = [1]
    for name, expands in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        sizes += tensor(given, name).sizes
        integers(given, expands)
    return max(sizes)


STEPS |= {f"aten.{name}.input": _time_steps for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")} | {
    "aten._trilinear.default": _unrolled,
    "aten.bilinear.default": lambda g: max((1, *tensor(g, "weight").sizes)),
    "aten.diff.default": lambda g: min(integer(g, "n"), _size(g)),
    "shoal.grouped_mm.default": lambda g: rank(tensor(g, "weight"), "weight", 3, 3)[0],
    "shoal.int8_grouped_mm.default": _expert_slices,
    "shoal.int8_linear.default": lambda g: _slices(rank(tensor(g, "weight"), "weight", 2, 2)),
}


def _slices(sizes: Sequence[int]) -> int:
    from ..quantized import slice_rows  # which imports torch, as no rule does

    return -(-max(sizes) // slice_rows(min(sizes)))


# ---------------------------------------------------------------- norms


def _per_channel(given: Given, names: Sequence[str], channels: int) -> None:
    """Each is absent or has one element a channel; all have one dtype, the input's or, for an input
    of half the width, float32."""
    dtype = tensor(given, "input").dtype
    own = {dtype, "float32"} if dtype in ("float16", "bfloat16") else {dtype}
    found: set[str] = set()
    for name in names:
        if given.get(name) is not None:
            spec = tensor(given, name)
            shaped(spec, name, (channels,))
            found.add(spec.dtype)
    need(
        len(found) <= 1 and found <= own,
        f"{', '.join(names)} have the dtypes {', '.join(sorted(found))}: "
        f"expected one of {', '.join(sorted(own))}",
    )


def _channels(given: Given) -> int:
    spec = tensor(given, "input")
    channels = rank(spec, "input", 2)[1]
    need(spec.is_floating and spec.elements > 0, f"input is {spec!r}: expected one float or more")
    return channels


@_rule(
    "aten._native_batch_norm_legit_functional.default "
    "aten._native_batch_norm_legit_no_training.default"
)
def _batch_norm(given: Given) -> None:
    names = ("weight", "bias", "running_mean", "running_var")
    tensor(given, "running_mean"), tensor(given, "running_var")
    _per_channel(given, names, _channels(given))


@_rule("aten._native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(given: Given) -> None:
    need(flag(given, "training"), "training is false: expected true, as there are no statistics")
    _per_channel(given, ("weight", "bias"), _channels(given))


@_rule("aten.instance_norm.default")
def _instance_norm(given: Given) -> None:
    channels = _channels(given)
    both = [given.get(n) is not None for n in ("running_mean", "running_var")]
    need(both[0] == both[1], "expected both running_mean and running_var or neither")
    need(
        both[0] or given.get("use_input_stats") is True,
        "use_input_stats is not true: expected true, as there are no statistics",
    )
    _per_channel(given, ("weight", "bias", "running_mean", "running_var"), channels)


@_rule("aten.native_group_norm.default")
def _group_norm(given: Given) -> None:
    channels = _channels(given)
    sizes = tensor(given, "input").sizes
    told = tuple(integer(given, n) for n in ("N", "C", "HxW"))
    found = (sizes[0], channels, math.prod(sizes[2:]))
    need(told == found, f"N, C and HxW are {told}: expected {found}, as input has them")
    group = integer(given, "group", least=1)
    need(channels % group == 0, f"{channels} channels are not {group} equal groups")
    _per_channel(given, ("weight", "bias"), channels)


@_rule("aten._weight_norm.default aten._weight_norm_interface.default")
def _weight_norm(given: Given) -> None:
    v, g, dim = tensor(given, "v"), tensor(given, "g"), integer(given, "dim")
    sizes = rank(v, "v", 1)
    need(v.is_floating, f"v is {v!r}: expected floating numbers")
    need(0 <= dim < len(sizes), f"dim is {dim}: expected 0 to {len(sizes) - 1}")
    shaped(g, "g", [s if i == dim else 1 for i, s in enumerate(sizes)], v.dtype)


# ---------------------------------------------------------------- recurrent layers


def _gated(given: Given, gates: int, states: Sequence[TensorSpec]) -> None:
    """One or two states (layers · ways, batch, hidden), and the weights of each layer and way. An
    LSTM whose two states differ in width projects the first."""
    layers, ways = integer(given, "num_layers", least=1), 2 if flag(given, "bidirectional") else 1
    biases, first = flag(given, "has_biases"), flag(given, "batch_first")
    given_dropout = given.get("dropout")
    need(
        given_dropout == 0 or not flag(given, "train") or layers == 1,
        f"dropout is {given_dropout!r}: expected 0, or shoal.dropout between layers of their own",
    )
    spec = tensor(given, "input")
    need(spec.is_floating, f"input is {spec!r}: expected floating numbers")
    sizes = rank(spec, "input", 3, 3)
    batch, wide = sizes[0 if first else 1], sizes[2]
    hidden = rank(states[-1], "hx", 3, 3)[2]
    out = rank(states[0], "hx", 3, 3)[2]
    for i, state in enumerate(states):
        shaped(
            state,
            f"hx {i}",
            (layers * ways, batch, (out, hidden)[i == len(states) - 1]),
            spec.dtype,
        )
    need(hidden > 0 and out > 0, "hx has no elements: expected a hidden size of at least 1")
    weights: list[tuple[int, ...]] = []
    for layer in range(layers):
        for _ in range(ways):
            weights += [(gates * hidden, out * ways if layer else wide), (gates * hidden, out)]
            weights += [(gates * hidden,)] * 2 if biases else []
            weights += [(out, hidden)] if out != hidden else []
        need(
            len(weights) <= len(given.get("params") or ()),
            "params has too few tensors for its layers",
        )
    params = tensors(given, "params", len(weights))
    for i, (found, shape) in enumerate(zip(params, weights, strict=True)):
        shaped(found, f"params {i}", shape, spec.dtype)


def _cell(given: Given, gates: int, states: Sequence[TensorSpec]) -> None:
    spec = tensor(given, "input")
    need(spec.is_floating, f"input is {spec!r}: expected floating numbers")
    batch, wide = rank(spec, "input", 2, 2)
    hidden = rank(states[0], "hx", 2, 2)[1]
    need(hidden > 0, "hx has no elements: expected a hidden size of at least 1")
    for state in states:
        shaped(state, "hx", (batch, hidden), spec.dtype)
    shaped(tensor(given, "w_ih"), "w_ih", (gates * hidden, wide), spec.dtype)
    shaped(tensor(given, "w_hh"), "w_hh", (gates * hidden, hidden), spec.dtype)
    biases = [given.get(n) is not None for n in ("b_ih", "b_hh")]
    need(biases[0] == biases[1], "expected both b_ih and b_hh or neither")
    for name in ("b_ih", "b_hh"):
        if biases[0]:
            shaped(tensor(given, name), name, (gates * hidden,), spec.dtype)


TABLE |= {
    "aten.lstm.input": lambda g: _gated(g, 4, tensors(g, "hx", 2)),
    "aten.gru.input": lambda g: _gated(g, 3, (tensor(g, "hx"),)),
    "aten.rnn_tanh.input": lambda g: _gated(g, 1, (tensor(g, "hx"),)),
    "aten.rnn_relu.input": lambda g: _gated(g, 1, (tensor(g, "hx"),)),
    "aten.lstm_cell.default": lambda g: _cell(g, 4, tensors(g, "hx", 2)),
    "aten.gru_cell.default": lambda g: _cell(g, 3, (tensor(g, "hx"),)),
}


# ---------------------------------------------------------------- sampling and views


@_rule("aten.grid_sampler_2d.default aten.grid_sampler.default")
def _grid(given: Given) -> None:
    source, grid = tensor(given, "input"), tensor(given, "grid")
    sizes, places = rank(source, "input", 4, 5), rank(grid, "grid", 4, 5)
    need(source.is_floating, f"input is {source!r}: expected floating numbers")
    need(
        len(places) == len(sizes)
        and (places[0], places[-1]) == (sizes[0], len(sizes) - 2)
        and grid.dtype == source.dtype,
        f"grid is {grid!r}: expected {source.dtype}[{sizes[0]}, …, {len(sizes) - 2}]",
    )
    need(min(sizes[2:]) > 0, f"input is {source!r}: expected something to sample")


def _upsampled(given: Given) -> None:
    """Scales are what the sizes are to each other: kernels multiply places by them."""
    spec = tensor(given, "self")
    sizes, out = spec.sizes[2:], integers(given, "output_size")
    scales = [given[n] for n in ("scales", "scales_h", "scales_w") if n in given]
    need(
        len(sizes) == len(out) == len(scales), f"self is {spec!r}, output_size has {len(out)} sizes"
    )
    for size, made, scale in zip(sizes, out, scales, strict=True):
        if scale is not None:
            _scale(scale)
            need(int(size * scale) == made, f"a scale of {scale} makes no {made} of {size}")


def _scale(scale: Any) -> None:
    need(
        isinstance(scale, int | float) and 2**-20 <= scale <= 2**20,
        f"a scale is {scale!r}: expected a number from 2^-20 to 2^20",
    )


def _upsampled_by(given: Given) -> None:
    tensor(given, "input")
    sizes, scales = given.get("output_size"), given.get("scale_factors")
    need((sizes is None) != (scales is None), "expected output_size or scale_factors, and not both")
    need(scales is None or isinstance(scales, tuple), "scale_factors: expected a list of numbers")
    need(sizes is None or isinstance(sizes, tuple), "output_size: expected a list of integers")
    for scale in scales or ():
        _scale(scale)


for _name in ("nearest1d", "nearest2d", "bilinear2d", "bicubic2d"):
    TABLE[f"aten.upsample_{_name}.default"] = _upsampled
    TABLE[f"aten.upsample_{_name}.vec"] = _upsampled_by


@_rule("aten.pixel_unshuffle.default")
def _something(given: Given) -> None:
    """Refuses an empty tensor: the kernel makes another shape of it than meta tensors tell."""
    spec = tensor(given, "self")
    need(spec.elements > 0, f"self is {spec!r}: expected one element or more")


@_rule("aten.huber_loss.default aten.soft_margin_loss.default")
def _one_dtype(given: Given) -> None:
    """Refuses two dtypes: the kernels make another dtype of them than meta tensors tell."""
    spec, target = tensor(given, "self"), tensor(given, "target")
    need(spec.dtype == target.dtype, f"target is {target!r}: expected {spec.dtype}, as self is")


@_rule("aten._reshape_alias.default")
def _contiguous_alias(given: Given) -> None:
    """Make an alias whose strides nobody checks. A stage runs a reshape in its place."""
    spec, size, stride = tensor(given, "self"), integers(given, "size"), integers(given, "stride")
    strides = tuple(math.prod(max(1, s) for s in size[i + 1 :]) for i in range(len(size)))
    need(
        min((0, *size)) == 0 and math.prod(size) == spec.elements and stride == strides,
        f"size {list(size)} and stride {list(stride)} are no contiguous view of {spec!r}",
    )


# ---------------------------------------------------------------- numbers that are counted with


_MOST_COUNT = 1 << 60


@_rule("aten.arange.default aten.arange.start aten.arange.start_step")
def _arange(given: Given) -> None:
    """How many there are is reckoned in 64 bits, from the sum of all three."""
    for name in ("start", "end", "step"):
        value = given.get(name)
        if isinstance(value, int):
            need(abs(value) <= _MOST_COUNT, f"{name} is {value}: expected at most 2^60")


# ---------------------------------------------------------------- shapes that nobody compares


@_rule("aten.binary_cross_entropy.default")
def _binary_cross_entropy(given: Given) -> None:
    """Shapes that broadcast pass the meta tensors, and the kernel writes none of the result."""
    source = tensor(given, "self")
    target, weight = tensor(given, "target"), given.get("weight")
    need(
        (target.shape, target.dtype) == (source.shape, source.dtype),
        f"target is {target!r}: expected {source!r}, as self is",
    )
    if isinstance(weight, TensorSpec):
        need(weight.dtype == source.dtype, f"weight is {weight!r}: expected {source.dtype}")


@_rule("aten.addmv.default")
def _addmv(given: Given) -> None:
    """Refuses a matrix without rows unless what is added is empty: kernels differ in the result's
    length."""
    matrix, added = tensor(given, "mat"), tensor(given, "self")
    if len(matrix.sizes) == 2 and matrix.sizes[0] == 0:
        need(added.sizes == (0,), f"self is {added!r}: expected {matrix.dtype}[0]")
