"""Rules of what goes over its input by windows, and of counts that kernels reckon with: see
rules.py."""

from __future__ import annotations

from functools import partial

from ..graph import TensorSpec
from .words import Given, Rule, adding_to, integer, integers, need, rank, tensor

__all__ = ["WINDOWS"]

WINDOWS: dict[str, Rule] = {}
"""By operator."""
_rule = adding_to(WINDOWS)

MOST = 1 << 16
"""The largest value of a stride, a padding and a dilation: near 2^31 kernels multiply them into
another number, or go on without end."""


def _bounded(given: Given, name: str, least: int) -> tuple[int, ...]:
    found = integers(given, name)
    need(
        all(least <= n <= MOST for n in found),
        f"{name} is {list(found)}: expected {least} to {MOST}",
    )
    return found


# ---------------------------------------------------------------- convolutions


def _convolution(given: Given) -> None:
    source, weight = tensor(given, "input"), tensor(given, "weight")
    need(
        weight.elements > 0 and weight.dtype == source.dtype,
        f"weight is {weight!r}: expected one element or more, in {source.dtype} as input is",
    )
    for name, least in (("stride", 1), ("dilation", 1), ("padding", 0), ("output_padding", 0)):
        if name in given and not isinstance(given[name], str):
            _bounded(given, name, least)


WINDOWS |= dict.fromkeys(
    (
        "aten.conv1d.default",
        "aten.conv1d.padding",
        "aten.conv2d.default",
        "aten.conv2d.padding",
        "aten.conv3d.default",
        "aten.convolution.default",
        "aten.conv_transpose1d.default",
        "aten.conv_transpose2d.input",
        "aten.conv_transpose3d.input",
    ),
    _convolution,
)


# ---------------------------------------------------------------- pools


def _largest(given: Given, dims: int) -> None:
    """The largest of a window that has no element of the input is none, and its index is read
    with. With a dilation of at most the input's size each has one: the last that begins before
    the input has an element among its first `dilation`, and no window begins behind it."""
    source = tensor(given, "self")
    sizes = rank(source, "self", dims + 1, dims + 2)[-dims:]
    _bounded(given, "stride", 1), _bounded(given, "padding", 0)
    apart = _bounded(given, "dilation", 1)
    apart = apart * dims if len(apart) == 1 else apart
    need(
        len(apart) == dims and all(d <= size for d, size in zip(apart, sizes, strict=True)),
        f"dilation is {list(apart)}: expected at most the sizes {list(sizes)} that it goes over",
    )


WINDOWS |= {
    "aten.max_pool1d.default": partial(_largest, dims=1),
    "aten.max_pool2d.default": partial(_largest, dims=2),
    "aten.max_pool2d_with_indices.default": partial(_largest, dims=2),
    "aten.max_pool3d.default": partial(_largest, dims=3),
}


# ---------------------------------------------------------------- attention


@_rule("aten.scaled_dot_product_attention.default")
def _attention(given: Given) -> None:
    """Refuses dropout, and shared heads that do not divide evenly: kernels divide by how many heads
    the keys have."""
    need(given.get("dropout_p") == 0, "dropout_p is not 0: expected shoal.dropout in its place")
    if given.get("enable_gqa") is True:
        query, key, value = (rank(tensor(given, n), n, 4, 4) for n in ("query", "key", "value"))
        heads = query[1], key[1], value[1]
        need(
            query[0] == key[0] == value[0]
            and 0 < heads[1] == heads[2]
            and heads[0] % heads[1] == 0,
            f"query, key and value have {query[:2]}, {key[:2]}, {value[:2]} samples and heads: "
            "expected the same, but for heads that several of the query's share",
        )


# ---------------------------------------------------------------- counts


@_rule("aten.tril_indices.default aten.triu_indices.default")
def _corner(given: Given) -> None:
    for name in ("row", "col"):
        need(0 <= integer(given, name) <= 1 << 31, f"{name}: expected 0 to 2^31")
    need(abs(integer(given, "offset")) <= 1 << 31, "offset: expected -2^31 to 2^31")


@_rule("aten.linear.default")
def _linear(given: Given) -> None:
    """A bias that broadcasts makes another shape on the device than meta tensors tell, and integers
    times floating numbers another dtype."""
    source, weight, bias = tensor(given, "input"), tensor(given, "weight"), given.get("bias")
    need(
        source.dtype == weight.dtype or (source.is_floating and weight.is_floating),
        f"weight is {weight!r}: expected {source.dtype} as input is, or floating numbers in both",
    )
    if isinstance(bias, TensorSpec):
        need(
            bias.sizes == weight.sizes[:-1],
            f"bias is {bias!r}: expected {list(weight.sizes[:-1])}, as many as weight has rows",
        )


@_rule("aten.to.dtype_layout")
def _cast(given: Given) -> None:
    tensor(given, "self")
