"""The random numbers of a graph, given to the module that it was captured from.

A graph draws by counters (dag/ir/random.py), torch by its generators. With these modes around it, a
forward gets from torch what the graph draws in the same place, so that both can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir import random
from ..ir.graph import Graph, Operator
from ..ir.operators import takes_key
from .torch_calls import TorchCalls

__all__ = ["GivenDraws", "UnlikeDrawsError"]


class UnlikeDrawsError(Exception):
    """A forward that does not draw what its graph draws, in its order."""


class GivenDraws:
    """The draws of a bound graph in their order, for those calls of forward that its results depend
    on (`live`: their numbers)."""

    def __init__(self, graph: Graph, live: frozenset[int]) -> None:
        drawing = [op for op in graph.operators if takes_key(op.target)]
        self._operators = sorted(drawing, key=lambda op: int(str(op.args[-1])))
        self._live = live
        self.recomputes = False
        """Whether a part of forward would be run again for its gradient, and draw again."""

    @contextmanager
    def of(self, key: int) -> Iterator[None]:
        """Around one forward. Raises UnlikeDrawsError."""
        calls = TorchCalls({})
        calls.begin({})
        draws = _Draws(self._operators, self._live, calls, key)
        with calls, draws:
            yield
        self.recomputes |= draws.recomputes
        if draws.left:
            raise UnlikeDrawsError(f"forward does not draw what {draws.left[0]!r} does")


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    def __init__(
        self, operators: list[Operator], live: frozenset[int], calls: TorchCalls, key: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = list(operators)
        self.recomputes = False
        self._live, self._calls, self._key = live, calls, key

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        if self._calls.running not in self._live or _without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.recomputes |= hooks is not None
        if not self.left:
            raise UnlikeDrawsError(f"forward draws by {func}, the graph nothing more")
        return self._given(self.left.pop(0), func, args, kwargs)

    def _given(self, op: Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the operator draws, in the place of what torch's function would."""
        kind, number, key = op.target.split(".")[1], int(str(op.args[-1])), self._key
        name = str(func).split(".")[1]
        if kind in ("dropout", "attention", "feature_dropout") and name == "bernoulli_":
            p = float(str(op.args[4 if kind == "attention" else 1]))
            drop = random.feature_dropout if kind == "feature_dropout" else random.dropout
            kept = drop(torch.ones(args[0].shape), p, number, key=key) != 0
            return args[0].copy_(kept)
        if kind == "bernoulli" and name in ("bernoulli", "bernoulli_"):
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            return self._made(random.bernoulli(args[0].shape, p, number, key=key), name, args[0])
        if kind == "bernoulli_like" and name in ("bernoulli", "bernoulli_"):
            chances = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
            return self._made(random.bernoulli_like(chances, number, key=key), name, args[0])
        if kind in ("rand", "randn", "exponential"):
            result = func(*args, **kwargs)
            if kind == "exponential":
                rate = kwargs.get("lambd", args[1] if len(args) > 1 else 1.0)
                made = random.exponential(result.shape, rate, number, key=key)
            elif name.startswith(kind) and name in ("rand", "randn", "rand_like", "randn_like"):
                made = random.OPERATORS[kind](result.shape, number, dtype=result.dtype, key=key)
            else:
                raise UnlikeDrawsError(f"forward draws by {func}, the graph by {op!r}")
            return result.copy_(made)
        raise UnlikeDrawsError(f"forward draws by {func}, the graph by {op!r}")

    def _made(self, value: Tensor, name: str, like: Tensor) -> Tensor:
        return like.copy_(value) if name.endswith("_") else value.to(like.dtype)


def _without_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it is a kernel of attention that could draw, and drops nothing here."""
    for place, one in enumerate(func._schema.arguments):
        if one.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get(one.name, one.default_value)
            return bool(given == 0.0)
    return False
