"""Results of methods whose contributions are smaller side by side than their mean is: whoever adds
up a part passes all of them on as they came, and whoever takes the result adds them up as well. A
sum has no order (`dag/rounds/sums.py`), so all come to the same bits.

    [weight, length, a contribution to the part as its giver wrote it] for each giver
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from torch import Tensor

from ...compression.codec import CodecError
from ...dag.ir.graph import TensorSpec
from ...dag.rounds.sums import WeightedSum
from ...dag.rounds.vector import Span
from ...proto import broker_pb2
from .coding import PartCoding

__all__ = ["SideBySide", "joined"]

_FRONT = struct.Struct("<QQ")
"""What stands in front of each contribution."""
_MOST_MEMBERS = 64
"""Contributions in one result, before a plan says how many."""


def joined(given: Iterable[tuple[int, Sequence[memoryview]]]) -> tuple[memoryview, ...]:
    """Return the bytes of a result. `given`: by giver, the weight and the bytes."""
    found: list[memoryview] = []
    for weight, buffers in given:
        size = sum(b.nbytes for b in buffers)
        found += (memoryview(_FRONT.pack(weight, size)), *buffers)
    return tuple(found)


class SideBySide(PartCoding):
    """How results are written where contributions are by `given`."""

    def __init__(self, given: PartCoding, plan: broker_pb2.RoundPlan | None = None) -> None:
        self.vector, self._given = given.vector, given
        self._plan = plan or broker_pb2.RoundPlan(members=_MOST_MEMBERS)

    @property
    def name(self) -> str:
        return self._given.name

    def spec(self, part: Span) -> TensorSpec:
        return self._given.spec(part)

    def most_bytes(self, part: Span) -> int:
        return self._plan.members * (_FRONT.size + self._given.most_bytes(part))

    def typical_bytes(self, part: Span) -> int:
        return self._plan.members * (_FRONT.size + self._given.typical_bytes(part))

    def decode(self, part: Span, data: memoryview) -> Tensor:
        """Raises LargeContributionError, too."""
        plan, integers = self._plan, self.vector.integers(part)
        found = WeightedSum(part[1] - part[0], plan.weight, plan.exponent, integers)
        at = weights = 0
        while at + _FRONT.size <= len(data):
            weight, size = _FRONT.unpack_from(data, at)
            at += _FRONT.size
            weights += weight
            if weights > plan.weight:
                break
            found.add(self._given.decode(part, data[at : at + size]), weight)
            at += size
        if (at, weights) != (len(data), plan.weight):
            raise CodecError(
                f"{len(data)} bytes of contributions that weigh {weights}: expected {at} that "
                f"weigh {plan.weight}"
            )
        return found.mean()
