"""Calls of an operator made from its seeds by changing them: part of benchmarks/operators/fuzz.py.

Random garbage is refused by torch's own shape functions and tests nothing. So each case begins with
a call that works (seeds.py), of which one to three things change: a size, everywhere or in
one place, a dtype, a layout, what is in a tensor, a number, a text, a list, an argument that is
absent.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.benchmarks.operators.seeds import SEEDS, Like
from shoal.dag.ir.graph import (
    ITEM_BYTES,
    Arg,
    Device,
    Dtype,
    MemoryFormat,
    Operator,
    Ref,
    TensorSpec,
)
from shoal.dag.ir.operators import is_own, resolve

__all__ = ["Case", "draw", "laid", "stored"]

LAYOUTS = ("plain", "plain", "transposed", "expanded", "stepped", "offset", "channels_last")
"""How a tensor lies in memory: `expanded` has stride 0 in one dimension, `stepped` leaves every
second element of its rows out, `offset` starts behind others. All occur within a stage."""

VALUES = ("normal", "normal", "wild", "zeros", "equal", "unit")
"""`wild`: indices out of range, NaN, infinities, numbers at the ends of the dtype."""

INTS: tuple[int, ...] = (0, 1, -1, 2, 3, -2, 4, 5, 7, 16, 100, -100)
INTS += (2**31 - 1, 2**31, -(2**31), 2**40, -(2**40), 2**62, 2**63 - 1, -(2**63))
FLOATS = (
    0.0,
    -1.0,
    1.0,
    0.5,
    2.0,
    math.nan,
    math.inf,
    -math.inf,
    1e-30,
    1e30,
    -1e30,
    1e300,
    1e-300,
)
TEXTS: tuple[str, ...] = ("none", "tanh", "floor", "trunc", "sum", "mean", "prod", "amax", "amin")
TEXTS += ("constant",)
TEXTS += ("reflect", "replicate", "circular", "same", "valid", "left", "right", "", "x" * 40)
TEXTS += ("i,j->ij", "ij,kl->", "ii,jk->k", "...i,ij->...j", "ij->ji", "i,i,i->i", "i->ii", "->")
SIZES = (0, 0, 1, 1, 2, 3, 4, 5, 6, 8, 9, 12, 17, 33)
HUGE = (2**20, 2**31, 2**33, 2**47)


@dataclass(frozen=True)
class Case:
    """One call. `specs` and `likes` are of the values `t0`, `t1`, … that it reads."""

    operator: Operator
    likes: dict[str, Like]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(like.shape, like.dtype) for name, like in self.likes.items()}

    def __repr__(self) -> str:
        given = ", ".join(
            f"{n}={TensorSpec(k.shape, k.dtype)!r}/{k.layout}/{k.values}"
            for n, k in self.likes.items()
        )
        return f"{self.operator!r} where {given}"


def draw(target: str, seed: int, index: int) -> Case:
    """Case `index` of an operator: always the same for the same three. The first are the seeds."""
    seeds = SEEDS[target]
    rng = random.Random(f"{seed}:{target}:{index}")
    if index < len(seeds):
        arguments, changes = _bound(target, seeds[index]), 0
    else:
        arguments = _bound(target, rng.choice(seeds))
        changes = rng.choice((0, 1, 1, 1, 2, 2, 3))
        if rng.random() < 0.3:
            arguments = _resized(arguments, rng)
        arguments = {n: _laid(a, rng) for n, a in arguments.items()}
    for _ in range(changes):
        name = rng.choice(list(arguments))
        arguments[name] = _changed(arguments[name], rng)
    return _case(target, arguments)


# ---------------------------------------------------------------- schemas


@cache  # torch makes a schema's arguments anew for whoever asks
def _parameters(target: str) -> list[tuple[str, Any, bool]]:
    """Name, default and whether by keyword only; the executor's own `key` is left out."""
    if is_own(target):
        found = inspect.signature(resolve(target)).parameters.values()
        return [(p.name, p.default, p.kind == p.KEYWORD_ONLY) for p in found if p.name != "key"]
    schema = resolve(target)._schema  # type: ignore[attr-defined]
    return [
        (a.name, _plain(a.default_value), a.kwarg_only)
        for a in schema.arguments
        if a.name not in ("layout", "pin_memory") and not (a.name == "dtype" and _later(schema))
    ]


def _later(schema: Any) -> bool:
    return schema.name in ("aten::tril_indices", "aten::triu_indices")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return None
    return value if isinstance(value, bool | int | float | str) else None


def _bound(target: str, seed: tuple[Any, ...]) -> dict[str, Any]:
    """Every argument by name, those that the seed leaves out with their default. A memory format
    whose default is a number (`contiguous`) is left out."""
    given = dict(seed[-1]) if seed and isinstance(seed[-1], dict) else {}
    positional = seed[:-1] if given else seed
    found: dict[str, Any] = {}
    for at, (name, default, by_name) in enumerate(_parameters(target)):
        if at < len(positional) and not by_name:
            found[name] = positional[at]
        elif name in given:
            found[name] = given[name]
        elif name == "device":
            found[name] = Device()
        elif not (name in ("memory_format", "implicit") or default is inspect.Parameter.empty):
            found[name] = default
    return found


def _case(target: str, arguments: dict[str, Any]) -> Case:
    likes: dict[str, Like] = {}

    def arg(value: Any) -> Arg:
        if isinstance(value, Like):
            name = f"t{len(likes)}"
            likes[name] = value
            return Ref(name)
        if isinstance(value, tuple):
            return tuple(arg(v) for v in value)
        return value  # type: ignore[no-any-return]

    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []
    for place, (name, _, by_name) in enumerate(_parameters(target)):
        if name not in arguments:
            continue
        if by_name or kwargs or len(args) != place:
            kwargs.append((name, arg(arguments[name])))
        else:
            args.append(arg(arguments[name]))
    return Case(Operator("op", target, tuple(args), tuple(kwargs), (), _several(target)), likes)


@cache
def _several(target: str) -> bool:
    if is_own(target):
        return False
    returns = resolve(target)._schema.returns  # type: ignore[attr-defined]
    return len(returns) > 1 or str(returns[0].type) == "List[Tensor]"


# ---------------------------------------------------------------- changes


def _resized(arguments: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One size becomes another wherever it stands, in tensors and mostly among the numbers."""
    sizes = sorted({s for a in arguments.values() for like in _likes(a) for s in like.shape})
    if not sizes:
        return arguments
    old, new = rng.choice(sizes), rng.choice(SIZES)
    numbers = rng.random() < 0.5

    def change(value: Any) -> Any:
        if isinstance(value, Like):
            shape = tuple(new if s == old else s for s in value.shape)
            return replace(value, shape=shape, high=new if value.high == old else value.high)
        if isinstance(value, tuple):
            return tuple(change(v) for v in value)
        return new if numbers and type(value) is int and value == old else value

    return {n: change(a) for n, a in arguments.items()}


def _likes(value: Any) -> list[Like]:
    if isinstance(value, Like):
        return [value]
    return [like for v in value for like in _likes(v)] if isinstance(value, tuple) else []


def _laid(value: Any, rng: random.Random) -> Any:
    if isinstance(value, Like) and rng.random() < 0.3:
        return replace(value, layout=rng.choice(LAYOUTS))
    return tuple(_laid(v, rng) for v in value) if isinstance(value, tuple) else value


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, Like):
        return rng.choice(_TENSOR)(value, rng)
    if isinstance(value, tuple):
        return _list(value, rng)
    if isinstance(value, bool):
        return not value if rng.random() < 0.9 else rng.choice((None, 2, -1))
    if isinstance(value, int):
        return _number(value, rng)
    if isinstance(value, float):
        return rng.choice(FLOATS) if rng.random() < 0.9 else rng.choice(INTS)
    if isinstance(value, str):
        return rng.choice(TEXTS)
    if isinstance(value, Dtype):
        return Dtype(rng.choice(list(ITEM_BYTES)))
    if isinstance(value, MemoryFormat):
        return MemoryFormat(rng.choice(("contiguous_format", "preserve_format", "channels_last")))
    if value is None:
        given = (True, rng.choice(INTS), rng.choice(FLOATS), (2,), (1, 1), (0.5, 2.0), "sum")
        return rng.choice(
            (*given, Dtype(rng.choice(list(ITEM_BYTES))), Like((4,)), Like(()), Like((3, 4)))
        )
    return value


def _number(value: int, rng: random.Random) -> int:
    return rng.choice((value + 1, value - 1, 2 * value, -value, *rng.sample(INTS, 6)))


def _list(value: tuple[Any, ...], rng: random.Random) -> Any:
    kind = rng.random()
    if not value or kind < 0.05:
        return rng.choice(((), None, (0,), (1, 2)))
    at = rng.randrange(len(value))
    if kind < 0.15:
        return value[:at] + value[at + 1 :]
    if kind < 0.25:
        return (*value[:at], value[at], *value[at:])
    if kind < 0.3:
        return tuple(rng.sample(value, len(value)))
    if kind < 0.33 and all(isinstance(v, int) for v in value):
        return (rng.choice(INTS),) * len(value)
    return (*value[:at], _changed(value[at], rng), *value[at + 1 :])


def _resize(like: Like, rng: random.Random) -> Like:
    if not like.shape:
        return replace(like, shape=(rng.choice(SIZES),))
    at = rng.randrange(len(like.shape))
    size = rng.choice(HUGE) if rng.random() < 0.03 else rng.choice((*SIZES, like.shape[at] + 1))
    return replace(like, shape=(*like.shape[:at], size, *like.shape[at + 1 :]))


def _narrow(like: Like, rng: random.Random) -> Like:
    """One dimension becomes 1, or all do: what broadcasts where it should not."""
    if rng.random() < 0.3:
        return replace(like, shape=(1,) * len(like.shape))
    at = rng.randrange(len(like.shape)) if like.shape else 0
    return replace(like, shape=tuple(1 if i == at else s for i, s in enumerate(like.shape)))


def _rank(like: Like, rng: random.Random) -> Like:
    at = rng.randint(0, len(like.shape))
    if rng.random() < 0.5 and like.shape:
        return replace(like, shape=like.shape[:at] + like.shape[at + 1 :])
    return replace(like, shape=(*like.shape[:at], rng.choice((1, 1, 2, 3)), *like.shape[at:]))


_TENSOR: tuple[Callable[[Like, random.Random], Like | None], ...] = (
    _resize,
    _resize,
    _narrow,
    _rank,
    lambda like, rng: replace(like, shape=tuple(rng.sample(like.shape, len(like.shape)))),
    lambda like, rng: replace(like, dtype=rng.choice(list(ITEM_BYTES))),
    lambda like, rng: replace(like, values=rng.choice(VALUES)),
    lambda like, rng: replace(like, values="wild"),
    lambda like, rng: replace(like, layout=rng.choice(LAYOUTS)),
    lambda like, rng: None if rng.random() < 0.5 else replace(like, shape=()),
)


# ---------------------------------------------------------------- tensors


def stored(like: Like, generator: torch.Generator) -> Tensor:
    """What lies in memory of a tensor; equal for an equal generator."""
    shape, layout = list(like.shape), like.layout
    if shape and layout == "expanded":
        shape[int(torch.randint(len(shape), (), generator=generator))] = 1
    elif shape and layout == "stepped":
        shape[-1] = max(0, 2 * shape[-1] - 1)
    elif shape and layout == "offset":
        shape[0] += 1
    elif len(shape) > 1 and layout == "transposed":
        shape[-1], shape[-2] = shape[-2], shape[-1]
    return _filled(shape, like, generator)


def laid(memory: Tensor, like: Like, device: torch.device) -> Tensor:
    """The tensor itself, a leaf, in a copy of what `stored` gave."""
    made = memory.clone(memory_format=torch.contiguous_format).to(device)
    if not like.shape:
        return made
    match like.layout:
        case "expanded":
            return made.expand(like.shape)
        case "stepped":
            return made[..., ::2]
        case "offset":
            return made[1:]
        case "transposed" if len(like.shape) > 1:
            return made.transpose(-1, -2)
        case "channels_last" if len(like.shape) == 4:
            return made.contiguous(memory_format=torch.channels_last)
    return made


def _filled(shape: list[int], like: Like, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, like.dtype)
    if like.values == "zeros":
        return torch.zeros(shape, dtype=dtype)
    if like.values == "equal":
        return torch.ones(shape, dtype=dtype)
    if not dtype.is_floating_point:
        made = torch.randint(0, max(1, like.high), shape, generator=generator).to(dtype)
    elif like.values == "unit":
        made = torch.rand(shape, dtype=torch.float64, generator=generator).to(dtype)
    else:
        made = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    if like.values == "wild" and made.numel():
        wild = _wild(dtype, like.high)
        chosen = wild[torch.randint(len(wild), shape, generator=generator)]
        made = torch.where(torch.rand(shape, generator=generator) < 0.3, chosen, made)
    return made


def _wild(dtype: torch.dtype, high: int) -> Tensor:
    """Numbers that do harm as indices, or in arithmetic."""
    if dtype.is_floating_point:
        odd = [math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -1.0, 1e-30, 1e5]
        return torch.tensor(odd).to(dtype)
    ends = torch.iinfo(dtype) if dtype != torch.bool else None
    least, most = (ends.min, ends.max) if ends else (0, 1)
    ints = (-1, -2, high, high + 1, -high - 1, 2**31, least, most, most // 8)
    return torch.tensor([v for v in ints if least <= v <= most]).to(dtype)
