"""Which operators are products with weights, and of how many numbers each sum in them is made.

A product multiplies data by a matrix of weights and adds up: every number that comes out is a sum
over several numbers of the data. The products are listed, by what their arguments mean:

- linear, matmul, mm, bmm, mv, dot, addmm, addbmm, baddbmm, addmv: the two factors, either of which
  may be the weights; what is added is not multiplied. Linear with weights in 8 bits: its input.
- a grouped product of rows that are routed to experts: the rows, times matrices that are weights.
- einsum: an operand of weights and another operand, over the letters that both have and the result
  has not.
- convolutions: the input, over its channels of one group and the positions of the kernel that can
  meet it. So a depthwise one with a kernel of one position is none: it scales.
- bilinear: both inputs. Recurrent layers and cells: the input. A state that they are given is
  carried along, so it is not multiplied.

Nothing else is one. Adding a table of positions, scaling, norms, masks, attention over the data and
distances leave the data as good as it was to whoever knows the weights, and so does a lookup: an
embedding's row tells its id, also where it is written as a product with `one_hot`. An operator that
is not listed keeps more beside the data, never less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..ir.graph import Operator, Ref, TensorSpec
from ..ir.operators import aten

__all__ = ["MIXES", "Sums", "sums"]

MIXES = 2
"""A sum of so many numbers is a product; one of fewer scales what it is made of."""

Sums = dict[str, tuple[int, int]]
"""By a value that an operator multiplies by weights and by nothing else: how many of its numbers
each number of the result is a sum of, at least; and how many of the gradient's numbers each number
of the value's gradient is a sum of."""

Specs = Mapping[str, TensorSpec]


def sums(op: Operator, specs: Specs, weights: Collection[str]) -> Sums:
    """What an operator of a bound graph multiplies by weights. `weights`: the matrices among the
    values that are made of nothing but parameters and buffers."""
    of = _PRODUCTS.get(op.target)
    if of is None:
        return {}
    found: dict[str, list[tuple[int, int]]] = {}
    try:
        for value, forward, backward in of(op, specs, weights):
            found.setdefault(value, []).append((forward, backward))
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        return {}  # with arguments that the operator itself would refuse
    return {
        value: (min(f for f, _ in pairs), min(b for _, b in pairs))
        for value, pairs in found.items()
        if op.mentions.count(value) == len(pairs)  # it comes in nowhere else
    }


_MOST = 52
"""Operands of an einsum that is looked at, as many as there are letters."""

Factors = Iterator[tuple[str, int, int]]


def _value(arg: Any) -> str:
    return arg.value if isinstance(arg, Ref) else ""


def _sides(a: str, b: str, weights: Collection[str]) -> tuple[bool, bool]:
    """Whether the first, and whether the second of two factors is data times weights."""
    return b in weights and a not in weights, a in weights and b not in weights


def _matmul(first: int) -> Callable[[Operator, Specs, Collection[str]], Factors]:
    """Arguments `first` and `first + 1` of shapes (…, n, k) and (…, k, m); without n or m for
    vectors."""

    def factors(op: Operator, specs: Specs, weights: Collection[str]) -> Factors:
        a, b = (_value(op.arg(first + i, "")) for i in (0, 1))
        if a not in specs or b not in specs:
            return
        left, right = specs[a].sizes, specs[b].sizes
        of_left, of_right = _sides(a, b, weights)
        if of_left:
            yield a, left[-1], right[-1] if len(right) > 1 else 1
        if of_right:
            yield b, left[-1], left[-2] if len(left) > 1 else 1

    return factors


def _linear(op: Operator, specs: Specs, weights: Collection[str]) -> Factors:
    """(…, k) and (m, k), or (k) for m = 1."""
    a, b = _value(op.arg(0, "input")), _value(op.arg(1, "weight"))
    if a not in specs or b not in specs:
        return
    left, right = specs[a].sizes, specs[b].sizes
    of_left, of_right = _sides(a, b, weights)
    if of_left:
        yield a, left[-1], math.prod(right[:-1])
    if of_right:
        yield b, left[-1], math.prod(left[:-1])


def _int8(op: Operator, specs: Specs, weights: Collection[str]) -> Factors:
    """(…, k), a matrix of k times m numbers, or one for each group of rows, and m scales of it."""
    a, b, scale = (_value(op.arg(i, n)) for i, n in enumerate(("x", "weight", "scale")))
    if a in specs and scale in specs and _sides(a, b, weights)[0]:
        yield a, specs[a].sizes[-1], max(specs[scale].sizes[-2:])


def _grouped(op: Operator, specs: Specs, weights: Collection[str]) -> Factors:
    """(rows, k) and, for each group of rows, one (k, m) of (groups, k, m)."""
    a, b = _value(op.arg(0, "x")), _value(op.arg(1, "weight"))
    if a in specs and b in specs and _sides(a, b, weights)[0]:
        yield a, specs[a].sizes[-1], specs[b].sizes[-1]


def _einsum(op: Operator, specs: Specs, weights: Collection[str]) -> Factors:
    text, operands = op.arg(0, "equation"), op.arg(1, "tensors")
    if not isinstance(text, str) or not isinstance(operands, tuple):
        return
    terms, _, result = text.replace(" ", "").partition("->")
    values, letters = [_value(o) for o in operands], terms.split(",")
    if len(values) != len(letters) or len(values) > _MOST or any(v not in specs for v in values):
        return
    size: dict[str, int] = {}
    for value, term in zip(values, letters, strict=True):
        before, _, after = term.partition("...")
        sizes = specs[value].sizes
        size.update(zip(before, sizes, strict=False))
        size.update(zip(reversed(after), reversed(sizes), strict=False))
    if "->" not in text:  # what stands there once is in the result
        result = "".join(c for c in size if terms.count(c) == 1)
    for i, value in enumerate(values):
        with_weights = (j for j, other in enumerate(values) if j != i and other in weights)
        if value in weights or (j := next(with_weights, None)) is None:
            continue
        mine, theirs = set(letters[i]) & set(size), set(letters[j]) & set(size)
        forward = math.prod(size[c] for c in (mine & theirs) - set(result))
        yield value, forward, math.prod(size[c] for c in (theirs & set(result)) - mine)


def _convolution(op: Operator, specs: Specs, weights: Collection[str]) -> Factors:
    """The weights are (out, in / groups, *kernel); transposed, (in, out / groups, *kernel)."""
    name = op.target.split(".")[1]
    a, b, made = _value(op.arg(0, "input")), _value(op.arg(1, "weight")), op.outputs[0].spec
    if a not in specs or made is None or not _sides(a, b, weights)[0]:
        return
    first, second, *kernel = specs[b].sizes
    dims = len(kernel)
    across = name.startswith("conv_transpose")
    groups, dilation = op.arg(6, "groups", 1), op.arg(5, "dilation", 1)
    if across:
        dilation = op.arg(7, "dilation", 1)
    if name == "convolution":
        across, groups = op.arg(6, "transposed"), op.arg(8, "groups")
    strides, dilations = _each(op.arg(3, "stride", 1), dims), _each(dilation, dims)
    # The operand whose positions are added up in a window, and the one that they are spread from.
    windowed, spread = (made, specs[a]) if across else (specs[a], made)
    seen = along = 1
    for k, stride, step, wide, narrow in zip(
        kernel, strides, dilations, windowed.sizes[-dims:], spread.sizes[-dims:], strict=True
    ):
        seen *= min(k, -(-wide // step))
        along *= max(1, min(k // stride, narrow)) if step == 1 else 1
    window, overlap = second * seen, first // groups * along
    yield (a, overlap, window) if across else (a, window, overlap)


def _each(given: Any, dims: int) -> tuple[int, ...]:
    found = given if isinstance(given, tuple) else (given,)
    return found if len(found) == dims else (found or (1,))[:1] * dims


def _bilinear(op: Operator, specs: Specs, weights: Collection[str]) -> Factors:
    """Weights (m, k1, k2)."""
    inputs, weight = [_value(op.arg(i, "")) for i in (0, 1)], _value(op.arg(2, "weight"))
    if weight in weights:
        m, *k = specs[weight].sizes
        yield from ((value, k[i], m) for i, value in enumerate(inputs) if value not in weights)


def _recurrent(op: Operator, specs: Specs, weights: Collection[str]) -> Factors:
    """Weights of the input (gates, k), the first of a list or of several arguments."""
    given, value = op.arg(2, "w_ih"), _value(op.arg(0, "input"))
    weight = _value(given[0] if isinstance(given, tuple) and given else given)
    if weight in weights and value not in weights:
        gates, k = specs[weight].sizes
        yield value, k, gates


_PRODUCTS: dict[str, Callable[[Operator, Specs, Collection[str]], Factors]] = {
    "aten.linear.default": _linear,
    "aten.einsum.default": _einsum,
    "shoal.grouped_mm.default": _grouped,
    **{f"shoal.{name}.default": _int8 for name in ("int8_linear", "int8_grouped_mm")},
    "aten.bilinear.default": _bilinear,
    **dict.fromkeys(aten("matmul mm bmm mv dot"), _matmul(0)),
    **dict.fromkeys(aten("addmm addbmm baddbmm addmv"), _matmul(1)),
    **{f"aten.conv{d}d.{o}": _convolution for d in (1, 2, 3) for o in ("default", "padding")},
    **dict.fromkeys(
        aten("convolution conv_transpose1d conv_transpose2d.input conv_transpose3d.input"),
        _convolution,
    ),
    **dict.fromkeys(
        aten("lstm.input gru.input rnn_tanh.input rnn_relu.input lstm_cell gru_cell"), _recurrent
    ),
}
