"""Which step of a recipe stands for an operator: constants, and arithmetic with numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...dag.ir.fx_args import dtype_name
from ...dag.ir.recipe import RecipeStep
from .contents import Op, StorageView

__all__ = ["ELEMENTWISE", "EMPTY", "Steps", "filled", "rounding"]

Steps = tuple[RecipeStep, ...]

EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero", "zero_"})
_ONES = frozenset({"ones", "ones_like", "new_ones"})
_FULL = frozenset({"full", "full_like", "new_full", "fill", "fill_", "scalar_tensor"})


def filled(op: Op, name: str) -> float | None:
    """The number that an operator puts everywhere."""
    if name in _ZEROS or name in _ONES:
        return 0.0 if name in _ZEROS else 1.0
    if name not in _FULL:
        return None
    numbers = [a for a in op.args if isinstance(a, (int, float))]
    return float(numbers[0]) if len(numbers) == 1 else None


def _number(op: Op, place: int = 1) -> float | None:
    """A number that an operator takes; of a tensor, one that is known."""
    given = op.args[place] if len(op.args) > place else None
    if isinstance(given, (int, float)):
        return float(given)
    if isinstance(given, StorageView) and given.elements == 1 and given.content is not None:
        real = given.content.real
        return None if real is None else float(real)
    return None


def _scaled(sign: float) -> Callable[[Op, int, int], Steps | None]:
    """Adding a number, or `alpha` times it."""

    def read(op: Op, begin: int, end: int) -> Steps | None:
        number = _number(op)
        if number is None:
            return None
        return (
            RecipeStep("shift", begin, end, (sign * float(op.kwargs.get("alpha", 1)) * number,)),
        )

    return read


def _times(op: Op, begin: int, end: int) -> Steps | None:
    number = _number(op)
    return None if number is None else (RecipeStep("scale", begin, end, (number,)),)


def _divided(op: Op, begin: int, end: int) -> Steps | None:
    number = _number(op)
    if not number or "rounding_mode" in op.kwargs:
        return None
    return (RecipeStep("scale", begin, end, (1.0 / number,)),)


def _taken_from(op: Op, begin: int, end: int) -> Steps | None:
    """A number less `alpha` times x."""
    number = _number(op)
    if number is None:
        return None
    scale = RecipeStep("scale", begin, end, (-float(op.kwargs.get("alpha", 1)),))
    return scale, RecipeStep("shift", begin, end, (number,))


def _negated(op: Op, begin: int, end: int) -> Steps:
    return (RecipeStep("scale", begin, end, (-1.0,)),)


def _inverse_error(op: Op, begin: int, end: int) -> Steps:
    return (RecipeStep("erfinv", begin, end),)


def _clamped(op: Op, begin: int, end: int) -> Steps | None:
    given = [op.kwargs.get("min"), op.kwargs.get("max")]
    given[: len(op.args) - 1] = op.args[1:]
    if any(not isinstance(n, (int, float, type(None))) for n in given):
        return None
    low, high = (None if n is None else float(n) for n in given)
    return (RecipeStep("clamp", begin, end, (low, high)),)


ELEMENTWISE: dict[str, Callable[[Op, int, int], Steps | None]] = {
    "mul": _times,
    "div": _divided,
    "add": _scaled(1.0),
    "sub": _scaled(-1.0),
    "rsub": _taken_from,
    "neg": _negated,
    "erfinv": _inverse_error,
    "clamp": _clamped,
}


def rounding(source: torch.dtype, target: torch.dtype | None, begin: int, end: int) -> Steps:
    """What a copy to another dtype changes besides the last rounding: nothing, unless the source
    has fewer digits."""
    if target is None or source == target or not source.is_floating_point:
        return ()
    if torch.finfo(source).eps <= torch.finfo(target).eps:
        return ()
    return (RecipeStep("round", begin, end, (), dtype_name(source)),)
