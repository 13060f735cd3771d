"""How a value hangs on the samples of a microbatch: the kinds that dag/analysis/samples.py
tells apart, and which shapes each can have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..ir.graph import Dim, Operator, Ref, Size

__all__ = [
    "COUNT",
    "FIXED",
    "Fixed",
    "Kind",
    "MeetError",
    "Numbers",
    "SampleRows",
    "SampleShare",
    "SampleSum",
    "fits",
    "is_whole",
    "words",
]

COUNT = "samples"


@dataclass(frozen=True)
class SampleRows:
    """A value with rows for each sample, `times` of them along `dim`; `dim` counts from the first
    dimension."""

    dim: int
    times: int = 1


@dataclass(frozen=True)
class Numbers:
    """The numbers of the samples along `dim`, the only dimension with sizes. Masks of transformers
    look their rows up with it."""

    dim: int


@dataclass(frozen=True)
class Fixed:
    """A value that does not depend on the samples."""


@dataclass(frozen=True)
class SampleSum:
    """A value that is a sum over the samples of what each gives. `of`: the value that it is,
    whatever casts came after. bounded: it is at least 1, where that sum of whole numbers is 0."""

    of: str
    bounded: bool = False


@dataclass(frozen=True)
class SampleShare:
    """A `SampleSum` divided by the `SampleSum` named `of`; `COUNT` is the number of samples."""

    of: str


Kind = SampleRows | Numbers | Fixed | SampleSum | SampleShare
FIXED = Fixed()


class MeetError(Exception):
    """Samples meet in an operator, as far as is known here."""


def words(text: str) -> frozenset[str]:
    """Names of operators out of a text."""
    return frozenset(text.split())


_KEEPS_WHOLE = words(
    "_to_copy to alias clone contiguous detach sum reshape view _unsafe_view flatten unflatten "
    "expand permute transpose t unsqueeze squeeze slice select"
)


def is_whole(op: Operator, whole: Collection[str]) -> bool:
    """Whether what an operator makes are numbers of 0, 1, 2, …, as those of labels are that count:
    truth values, and what is cast, added up or multiplied of such."""
    spec, name = op.outputs[0].spec, op.target.split(".")[1]
    if spec is None or spec.dtype in ("bfloat16", "float16"):
        return False  # which rounds the larger ones
    if spec.dtype == "bool":
        return True
    if name in ("full", "scalar_tensor"):
        return isinstance(op.args[-1], Size)
    if name in ("mul", "add"):
        others = [a for a in op.args if not isinstance(a, Ref)]
        if op.kwargs or not all(isinstance(a, int) and a >= 0 for a in others):
            return False
    elif name not in _KEEPS_WHOLE:
        return False
    return bool(op.reads) and all(v in whole for v in op.reads)


def fits(kind: Kind, shape: tuple[Dim, ...]) -> bool:
    """Whether a tensor of this shape can hang on the samples like that."""
    sized = [(i, d) for i, d in enumerate(shape) if isinstance(d, Size)]
    if isinstance(kind, Numbers):
        return sized == [(kind.dim, Size(1))]
    if not isinstance(kind, SampleRows):
        return not sized
    return sized == [(kind.dim, Size(kind.times))]
