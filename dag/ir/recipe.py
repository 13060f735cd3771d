"""Starting weights as a recipe: how each tensor of a new model is filled, in place of its values.

A tensor is made by steps, one after another, each over an interval of its elements (row-major):

    constant c             every element is c
    uniform low high       low + (high - low)·u, u uniform in (0, 1)
    normal mean std        mean + std·z, z standard normal
    orthogonal rows cols   the elements of an orthogonal matrix, which has exactly these
    scale c · shift c      x·c · x + c
    erfinv                 the inverse error function of x, which makes a truncated normal
    clamp low high         between low and high; None: no bound
    round DTYPE            to the nearest number that DTYPE has

All of it is float64 and the arithmetic of `draws.py`; at the end each element is rounded once to
the tensor's dtype. A step that draws names its stream, and the element of the stream with which its
interval begins: two tensors with one stream have equal draws, as copies of a layer have. So any
rows can be made by themselves, and are what they are in the whole tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import draws
from .convert import MAX_RECIPE_BYTES
from .draws import CHUNK, Floats
from .graph import FLOATING

__all__ = [
    "MOST_ORTHOGONAL",
    "Initial",
    "Recipe",
    "RecipeError",
    "RecipeStep",
    "make",
]

VERSION = 1
MOST_STEPS = 1024
"""The most steps of one tensor: each element passes through all of them."""
MOST_ORTHOGONAL = 1 << 30
"""rows · columns · min(rows, columns) of an orthogonal matrix: 1024 × 1024 takes some seconds. Of a
larger one the values are sent."""
_MOST_ELEMENTS = 1 << 53
_MOST_RANK = 32

_NUMBERS = {
    "constant": 1,
    "uniform": 2,
    "normal": 2,
    "orthogonal": 2,
    "scale": 1,
    "shift": 1,
    "erfinv": 0,
    "clamp": 2,
    "round": 0,
}
"""How many numbers a kind of step has."""
DRAWING = frozenset({"uniform", "normal", "orthogonal"})


class RecipeError(ValueError):
    """A recipe that breaks a rule of this module; says what was expected."""


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """One step over elements [begin, end). `text`: of a drawing kind its stream, of `round` the
    dtype. `first`: the element of the stream at `begin`."""

    kind: str
    begin: int
    end: int
    numbers: tuple[float | None, ...] = ()
    text: str = ""
    first: int = 0

    def moved(self, begin: int, end: int, by: int) -> RecipeStep | None:
        """Return the piece's part in [begin, end), `by` elements further on; None where it has none
        there."""
        low, high = max(begin, self.begin), min(end, self.end)
        if low >= high:
            return None
        first = self.first + (low - self.begin if self.kind in DRAWING else 0)
        return RecipeStep(self.kind, low + by, high + by, self.numbers, self.text, first)


@dataclass(frozen=True, slots=True)
class Initial:
    """One tensor: its shape, its dtype by torch's name, and the steps that fill it. An element that
    no step fills is 0."""

    shape: tuple[int, ...]
    dtype: str
    steps: tuple[RecipeStep, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Recipe:
    """The tensors of a model by the names of the user's module, each once, under one seed."""

    seed: int
    tensors: Mapping[str, Initial] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """JSON; floats are exact. Equal recipes have equal bytes."""
        tensors = {
            name: [
                list(t.shape),
                t.dtype,
                [[s.kind, s.begin, s.end, list(s.numbers), s.text, s.first] for s in t.steps],
            ]
            for name, t in sorted(self.tensors.items())
        }
        record = {"version": VERSION, "seed": self.seed, "tensors": tensors}
        return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Recipe:
        """Reads and checks what may come from anybody. Raises RecipeError."""
        if len(data) > MAX_RECIPE_BYTES:
            raise RecipeError(f"{len(data)} bytes: expected at most {MAX_RECIPE_BYTES}")
        try:
            record = json.loads(data)
            if record["version"] != VERSION or type(record["seed"]) is not int:
                raise RecipeError(f"version {record['version']!r:.20}: expected {VERSION}")
            tensors = {name: _initial(name, raw) for name, raw in record["tensors"].items()}
        except RecipeError as error:
            raise RecipeError(f"the recipe of the starting weights: {error}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            text = f"the recipe of the starting weights cannot be read: {error!r:.200}"
            raise RecipeError(text) from None
        return cls(record["seed"], tensors)


def _initial(name: str, raw: Any) -> Initial:
    shape, dtype, steps = raw
    if dtype not in FLOATING:
        raise RecipeError(f"{name!r:.80} is {dtype!r:.20}: expected one of {sorted(FLOATING)}")
    sound = len(shape) <= _MOST_RANK and all(_is_count(n) for n in shape)
    if not sound or (elements := math.prod(shape)) > _MOST_ELEMENTS:
        raise RecipeError(f"{name!r:.80} has shape {shape!r:.80}")
    if len(steps) > MOST_STEPS:
        raise RecipeError(f"{name!r:.80} has {len(steps)} steps: expected at most {MOST_STEPS}")
    return Initial(tuple(shape), dtype, tuple(_step(name, elements, s) for s in steps))


def _step(name: str, elements: int, raw: Any) -> RecipeStep:
    kind, begin, end, numbers, text, first = raw
    sound = (
        kind in _NUMBERS
        and all(_is_count(n) for n in (begin, end, first))
        and begin < end <= elements
        and first <= _MOST_ELEMENTS
        and len(numbers) == _NUMBERS[kind]
        and all(_is_finite(n) or (n is None and kind == "clamp") for n in numbers)
        and isinstance(text, str)
    )
    if sound and kind == "orthogonal":
        sound = all(n > 0 and n == int(n) for n in numbers)
        sound = sound and math.prod(map(int, (*numbers, min(numbers)))) <= MOST_ORTHOGONAL
        sound = sound and first + end - begin <= int(numbers[0]) * int(numbers[1])
    if sound and kind == "round":
        sound = text in FLOATING
    if not sound:
        raise RecipeError(f"a step of {name!r:.80} is {raw!r:.200}")
    return RecipeStep(kind, begin, end, tuple(numbers), text, first)


def _is_count(n: Any) -> bool:
    return type(n) is int and n >= 0


def _is_finite(n: Any) -> bool:
    return type(n) in (int, float) and math.isfinite(n)


# ---------------------------------------------------------------- making


def make(
    initial: Initial, seed: int, rows: tuple[int, int] | None = None, *, threads: int = 1
) -> Tensor:
    """The tensor, or its rows [start, stop): a fresh one on the CPU. The same bits with any number
    of threads. Besides the result it takes some chunks of float64, and the whole of an orthogonal
    matrix. Raises RecipeError for rows that it does not have."""
    shape, begin, end = initial.shape, 0, initial.elements
    if rows is not None:
        start, stop = rows
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise RecipeError(f"rows {start} to {stop} of a tensor of shape {shape}")
        one = math.prod(shape[1:])
        shape, begin, end = (stop - start, *shape[1:]), start * one, stop * one
    out = torch.empty(shape, dtype=getattr(torch, initial.dtype))
    if begin == end:
        return out
    steps = [s for step in initial.steps if (s := step.moved(begin, end, -begin)) is not None]
    fills = [(step, _of(step, seed)) for step in steps]
    flat = _numbers_of(out)

    def piece(at: int) -> None:
        until = min(at + CHUNK, end - begin)
        x = np.zeros(until - at)
        for step, apply in fills:
            low, high = max(at, step.begin), min(until, step.end)
            if low < high:
                apply(x[low - at : high - at], step.first + low - step.begin)
        _store(x, flat[at:until], initial.dtype)

    pieces = range(0, end - begin, CHUNK)
    if threads == 1 or len(pieces) == 1:
        for at in pieces:
            piece(at)
    else:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(piece, pieces):
                pass
    return out


Apply = Callable[[Floats, int], None]
"""Changes elements in place; told the stream's element of the first."""


def _of(step: RecipeStep, seed: int) -> Apply:
    """What a step does."""
    kind, numbers = step.kind, [0.0 if n is None else float(n) for n in step.numbers]
    if kind in ("uniform", "normal"):
        return _drawing(kind, draws.key_of(seed, step.text), numbers[0], numbers[1])
    if kind == "orthogonal":
        key, (rows, columns) = draws.key_of(seed, step.text), map(int, numbers)
        matrix = np.ascontiguousarray(draws.orthogonal(key, rows, columns)).reshape(-1)
        return lambda x, first: np.copyto(x, matrix[first : first + len(x)])
    return _ELEMENTWISE[kind](step, numbers)


def _drawing(kind: str, key: draws.Key, a: float, b: float) -> Apply:
    def apply(x: Floats, first: int) -> None:
        if kind == "normal":
            np.copyto(x, draws.normal(key, first, len(x)))
            x *= b
        else:
            np.copyto(x, draws.uniform(key, first, len(x)))
            x *= b - a
        x += a

    return apply


def _clamp(step: RecipeStep, numbers: Sequence[float]) -> Apply:
    low, high = (None if n is None else float(n) for n in step.numbers)

    def apply(x: Floats, first: int) -> None:
        if low is not None:
            np.maximum(x, low, out=x)
        if high is not None:
            np.minimum(x, high, out=x)

    return apply


def _erfinv(x: Floats, first: int) -> None:
    # erf(x) = 2 Φ(x√2) - 1. Only of 1 and -1 it is infinite; what is next to them stands for them.
    p = x * 0.5
    p += 0.5
    np.clip(p, 2.0**-54, 1.0 - 2.0**-53, out=p)
    np.copyto(x, draws.normal_quantile(p))
    x *= 0.7071067811865476


def _rounded(x: Floats, dtype: str) -> Floats:
    if dtype == "bfloat16":
        bits = _to_bfloat16(x)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return x if dtype == "float64" else x.astype(dtype).astype(np.float64)


_ELEMENTWISE: dict[str, Callable[[RecipeStep, Sequence[float]], Apply]] = {
    "constant": lambda step, n: lambda x, first: x.fill(n[0]),
    "scale": lambda step, n: lambda x, first: np.copyto(x, x * n[0]),
    "shift": lambda step, n: lambda x, first: np.copyto(x, x + n[0]),
    "clamp": _clamp,
    "erfinv": lambda step, n: _erfinv,
    "round": lambda step, n: lambda x, first: np.copyto(x, _rounded(x, step.text)),
}


def _numbers_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements of a contiguous tensor for numpy; those of bfloat16 as their bits."""
    flat = tensor.view(-1)
    return (flat.view(torch.uint16) if tensor.dtype == torch.bfloat16 else flat).numpy()


def _store(x: Floats, out: np.ndarray[Any, Any], dtype: str) -> None:
    with np.errstate(over="ignore"):
        np.copyto(out, _to_bfloat16(x) if dtype == "bfloat16" else x, casting="unsafe")


def _to_bfloat16(x: Floats) -> np.ndarray[Any, Any]:
    """The bits of the nearest bfloat16, ties to even. Rounded to 8 bits first, a number goes
    through float32 unchanged; only below 1e-38 it may be rounded twice."""
    bits = x.view(np.uint64)
    near = bits + (((bits >> np.uint64(45)) & np.uint64(1)) + np.uint64((1 << 44) - 1))
    near &= np.uint64(~((1 << 45) - 1) & ((1 << 64) - 1))
    with np.errstate(over="ignore"):
        single = near.view(np.float64).astype(np.float32)
    return (single.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
