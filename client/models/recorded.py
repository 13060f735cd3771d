"""What was recorded of a module, read as a recipe.

    storage --its content, and what that was made of--> steps over the storage's elements
            --the parameter's interval--> steps of the recipe

An operator that no step stands for, or a tensor that is no interval of its memory, ends the
reading: such a tensor is given its values here and sent with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ...dag.ir.fx_args import dtype_name
from ...dag.ir.graph import FLOATING
from ...dag.ir.recipe import MOST_ORTHOGONAL, MOST_STEPS, Initial, RecipeStep
from .contents import Op, StorageContent, StorageView, drawn
from .recorded_steps import ELEMENTWISE, EMPTY, Steps, filled, rounding

__all__ = ["Reading"]


class Reading:
    """Reads contents, each once."""

    def __init__(self) -> None:
        self._known: dict[StorageContent, Steps | None] = {}
        self._marked: dict[str, Op] = {}
        self._name, self._count = "", 0  # of the tensor that is read, and of its new streams

    def initial(self, name: str, view: StorageView) -> Initial | None:
        """The recipe of a tensor, which gives its name to the draws that have none; None where
        there is no recipe of it."""
        self._name, self._count = name, 0
        steps = self._of_view(view)
        if steps is None or len(steps) > MOST_STEPS or dtype_name(view.dtype) not in FLOATING:
            return None
        return Initial(view.shape, dtype_name(view.dtype), self._named(steps))

    def storage(self, content: StorageContent) -> Initial | None:
        """The recipe of a whole storage, as one row, for callers that need its values before the
        draws have names: these get numbers. None where there is no recipe of it."""
        lies = content.written or content.like
        if lies is None or dtype_name(lies.dtype) not in FLOATING:
            return None
        steps = self._of(content)
        if steps is None or len(steps) > MOST_STEPS:
            return None
        for op in (self._marked[s.text] for s in steps if s.text in self._marked):
            op.stream = op.stream or f"#{op.number}"  # begins no name of a parameter
        count = lies.storage_bytes // lies.dtype.itemsize
        return Initial((count,), dtype_name(lies.dtype), self._named(steps))

    # ------------------------------------------------------------ contents

    def _of_view(self, view: StorageView) -> Steps | None:
        """The steps of a tensor by its own elements."""
        content = view.content
        if content is None:
            return ()
        lies = content.written or content.like
        if view.interval is None or (lies is not None and lies.dtype != view.dtype):
            return None
        steps = self._of(content)
        return None if steps is None else _cut(steps, *view.interval, -view.offset)

    def _of(self, content: StorageContent) -> Steps | None:
        """The steps of a storage. The chain of operators that wrote it is read from its beginning:
        it may be long."""
        chain = []
        at: StorageContent | None = content
        while at is not None and at not in self._known:
            chain.append(at)
            at = at.written.content if at.written is not None else None
        for at in reversed(chain):
            self._known[at] = self._read(at)
        return self._known[content]

    def _read(self, content: StorageContent) -> Steps | None:
        op = content.op
        if op is None:
            return self._constant_of(content)
        target = content.written or content.like
        assert target is not None, "an operator made it or wrote into it"
        if target.interval is None:
            return None
        begin, end = target.interval
        before: Steps | None = ()
        if content.written is not None and content.written.content is not None:
            before = self._known[content.written.content]
        if begin == end or before is None:
            return before
        change = self._change(op, begin, end, content.written is not None)
        return None if change is None else _then(before, change)

    def _constant_of(self, content: StorageContent) -> Steps | None:
        """A number from outside, such as a factor."""
        real = content.real
        if real is None or real.numel() != 1 or real.untyped_storage().nbytes() != real.itemsize:
            return None
        return (RecipeStep("constant", 0, 1, (float(real),)),) if real.is_floating_point() else None

    # ------------------------------------------------------------ operators

    def _change(self, op: Op, begin: int, end: int, in_place: bool) -> Steps | None:
        """The steps that an operator adds over an interval; None: no steps stand for it. What a
        functional one reads comes first."""
        name = op.name.removesuffix("_") if in_place else op.name
        kind = drawn(op)
        if kind is not None:
            return (RecipeStep(kind[0], begin, end, kind[1], self._stream(op)),)
        if name in EMPTY:
            return ()
        if (constant := filled(op, name)) is not None:
            return (RecipeStep("constant", begin, end, (constant,)),)
        if name in ("copy", "fill"):
            return self._copied(op.args[1], begin, end, op.args[0].dtype)
        if name in ("clone", "_to_copy") and not in_place:
            return self._copied(op.args[0], begin, end, op.kwargs.get("dtype"))
        if name in ("mul", "mul_") and (matrix := self._orthogonal(op)) is not None:
            return (replace(matrix, begin=begin, end=end),)
        if name not in ELEMENTWISE or not isinstance(op.args[0], StorageView):
            return None
        steps = ELEMENTWISE[name](op, begin, end)
        if steps is None or in_place:
            return steps
        read = self._of_view(op.args[0])
        return None if read is None else (*_cut(read, 0, end - begin, begin), *steps)

    def _copied(self, source: Any, begin: int, end: int, dtype: torch.dtype | None) -> Steps | None:
        if not isinstance(source, StorageView):
            return None
        matrix = self._matrix(source)
        if matrix is not None and source.elements == end - begin:
            return (replace(matrix, begin=begin, end=end),)
        steps = self._of_view(source)
        if steps is None:
            return None
        if source.elements == 1 and len(steps) == 1 and steps[0].kind == "constant":
            return (replace(steps[0], begin=begin, end=end),)
        filled_elements = sum(s.end - s.begin for s in steps if s.kind in _FILLS)
        if source.elements != end - begin or filled_elements < source.elements:
            return None
        cast = rounding(source.dtype, dtype, begin, end)
        return (*_cut(steps, 0, end - begin, begin), *cast)

    def _matrix(self, view: StorageView) -> RecipeStep | None:
        """The step that makes a whole matrix of `orthogonal_`, or its transpose; None: the view is
        not one."""
        content = view.content
        if content is None or content.op is None or not content.op.name.startswith("mul"):
            return None
        matrix = self._orthogonal(content.op)
        if matrix is None or not view.is_whole or len(view.shape) != 2:
            return None
        rows, columns = view.shape  # of Q, or of its transpose
        return replace(matrix, numbers=(float(rows), float(columns)))

    def _orthogonal(self, op: Op) -> RecipeStep | None:
        """Q times the signs of R's diagonal, of normal numbers."""
        left, right = op.args[0], op.args[1] if len(op.args) > 1 else None
        if not isinstance(left, StorageView) or not isinstance(right, StorageView):
            return None
        q, sign = left.content, right.content
        if q is None or q.op is None or q.op.name != "linalg_qr" or q.result != 0:
            return None
        if sign is None or sign.op is None or sign.op.name != "sign":
            return None
        (diagonal,) = sign.op.args
        while diagonal.content is not None and diagonal.content.op is not q.op:
            inner = diagonal.content.op  # torch.diag copies
            if inner is None or inner.name not in ("diagonal_copy", "clone", "diag"):
                return None
            diagonal = inner.args[0]
        given = q.op.args[0]
        source = given.content.op if given.content is not None else None
        if source is None or drawn(source) != ("normal", (0.0, 1.0)) or not given.is_whole:
            return None
        tall, few = given.shape
        if tall * few * few > MOST_ORTHOGONAL or tall < few:
            return None
        return RecipeStep(
            "orthogonal", 0, tall * few, (float(tall), float(few)), self._stream(source)
        )

    # ------------------------------------------------------------ names of streams

    def _stream(self, op: Op) -> str:
        """A mark for the stream of a draw: it gets its name where it is known whose it is."""
        mark = f"\0{op.number}"
        self._marked[mark] = op
        return mark

    def _named(self, steps: Steps) -> Steps:
        marked = self._marked
        return tuple(
            replace(s, text=self._stream_name(marked[s.text])) if s.text in marked else s
            for s in steps
        )

    def _stream_name(self, op: Op) -> str:
        """The first tensor that has a draw gives it its name."""
        if not op.stream:
            op.stream = f"{self._name}#{self._count}" if self._count else self._name
            self._count += 1
        return op.stream


def _cut(steps: Iterable[RecipeStep], begin: int, end: int, by: int) -> Steps:
    """The part of some steps in [begin, end), moved."""
    return tuple(s for step in steps if (s := step.moved(begin, end, by)) is not None)


_FILLS = ("constant", "uniform", "normal", "orthogonal")


def _then(before: Steps, change: Steps) -> Steps:
    """Both after one another, without what is overwritten."""
    if not change or change[0].kind not in _FILLS:
        return before + change
    fill = change[0]
    return tuple(s for s in before if s.begin < fill.begin or s.end > fill.end) + change
