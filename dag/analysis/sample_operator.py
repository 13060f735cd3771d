"""One operator as `samples.py` sees it: its arguments, how they hang on the samples, and what it
makes of them where it goes element by element."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from ..ir.graph import Arg, Dim, Operator, Ref, Size, TensorSpec, refs
from .sample_kinds import COUNT, FIXED, Kind, MeetError, SampleRows, SampleShare, SampleSum

__all__ = ["SeenOperator"]


class SeenOperator:
    """One operator: its arguments, and how they hang on the samples."""

    def __init__(
        self,
        op: Operator,
        specs: Mapping[str, TensorSpec],
        kinds: Mapping[str, Kind],
        ignores_none: Callable[[Operator], bool],
        whole: Collection[str],
        counted: Mapping[tuple[str, Any], str],
    ) -> None:
        self.op, self.specs, self.kinds, self.ignores_none = op, specs, kinds, ignores_none
        self.whole, self.counted = whole, counted
        self.name = op.target.split(".")[1]
        self.out: tuple[Dim, ...] = op.outputs[0].spec.shape if op.outputs[0].spec else ()
        self.reads = op.reads

    def knows_batch(self) -> bool:
        """Whether an argument, apart from shapes, says how many samples there are."""
        given = (*self.op.args, *(a for _, a in self.op.kwargs))
        return any(isinstance(a, Size) for a in given)

    def meet(self, why: str = "") -> NoReturn:
        raise MeetError(why)

    # ------------------------------------------------------------ of the arguments

    def arg(self, index: int, default: Any = None) -> Any:
        return self.op.args[index] if len(self.op.args) > index else default

    def of(self, arg: Arg) -> Kind:
        return self.kinds[arg.value] if isinstance(arg, Ref) else FIXED

    def shape(self, arg: Arg) -> tuple[Dim, ...]:
        return self.specs[arg.value].shape if isinstance(arg, Ref) else ()

    def rows(self, arg: Arg) -> SampleRows:
        found = self.of(arg)
        return found if isinstance(found, SampleRows) else self.meet()

    def fixed(self, *args: Arg) -> None:
        if any(self.kinds[v] != FIXED for a in args for v in refs(a)):
            self.meet()

    def dims(self, arg: Any, rank: int) -> set[int]:
        """Dimensions that an argument names; all where it names none."""
        if arg is None or arg == ():
            return set(range(rank))
        return {d % rank if rank else 0 for d in (arg if isinstance(arg, tuple) else (arg,))}

    # ------------------------------------------------------------ element by element

    def aligned(self, *args: Arg) -> SampleRows | None:
        """Where the samples are in the result when dimensions are aligned from the last one on."""
        found = None
        for arg in args:
            kind = self.of(arg)
            if isinstance(kind, (SampleSum, SampleShare)):
                self.meet()
            if isinstance(kind, SampleRows):
                here = SampleRows(kind.dim - len(self.shape(arg)), kind.times)
                if found not in (None, here):
                    self.meet()
                found = here
        return found and SampleRows(found.dim + len(self.out), found.times)

    def pointwise(self) -> Kind:
        args = [Ref(v) for v in self.reads]
        kinds = [self.of(a) for a in args]
        if self.knows_batch():
            size = self.arg(1)
            whole = isinstance(size, Size) and size.plus == 0 and len(self.op.args) == 2
            whole = whole and not self.op.kwargs  # which round
            if self.name == "div" and isinstance(kinds[0], SampleSum) and whole:
                return SampleShare(COUNT)
            self.meet("knows how many samples there are")
        if not any(isinstance(k, (SampleSum, SampleShare)) for k in kinds):
            return self.aligned(*args) or FIXED
        return self._linear()

    def _linear(self) -> Kind:
        """The kind of an operator that keeps sums and shares: they may be added, scaled and
        divided."""
        first, second = self.arg(0), self.arg(1)
        a, b = self.of(first), self.of(second)
        keyword = dict(self.op.kwargs)
        if self.name in ("_to_copy", "to", "alias", "clone", "detach", "contiguous"):
            of = self.specs[self.reads[0]]
            rounds = of.is_floating and not self.specs[self.op.name].is_floating
            return self.meet("rounds a sum") if rounds and self.reads[0] not in self.whole else a
        if self.name in ("clamp", "clamp_min"):
            # A sum of nothing has weight 0: what it is divided by instead does not matter. One of
            # whole numbers is nothing, or at least 1.
            least = keyword.get("min", second)
            most = keyword.get("max", self.arg(2) if self.name == "clamp" else None)
            if isinstance(a, SampleSum) and most is None and least in (1, 1.0):
                if not isinstance(first, Ref) or first.value not in self.whole:
                    self.meet("bounds a sum that may be a fraction")
                return SampleSum(a.of, bounded=True)
        if isinstance(a, SampleSum) and a.bounded:
            self.meet("makes something else than a divisor of a bounded sum")
        if self.name == "neg":
            return a if isinstance(a, SampleShare) else SampleSum(self.op.name)
        if self.name in ("add", "sub") and "alpha" not in keyword:
            if isinstance(a, SampleShare) and b in (a, FIXED):
                return a
            if isinstance(b, SampleShare) and a in (b, FIXED):
                return b
            if isinstance(a, SampleSum) and isinstance(b, SampleSum) and not b.bounded:
                return SampleSum(self.op.name)
        if self.name == "mul" and FIXED in (a, b):
            other = b if a == FIXED else a
            if isinstance(other, SampleSum) and other.bounded:
                self.meet("makes something else than a divisor of a bounded sum")
            return other if isinstance(other, SampleShare) else SampleSum(self.op.name)
        if self.name in ("div", "true_divide") and not keyword:
            if b == FIXED:
                return a if isinstance(a, SampleShare) else SampleSum(self.op.name)
            if isinstance(a, SampleSum) and isinstance(b, SampleSum):
                return SampleShare(b.of)
        self.meet("makes something else than a mean of it")
