"""Results of methods whose contributions are smaller side by side than their mean is: whoever adds
up a part passes all of them on as they came, and whoever takes the result adds them up as well. A
sum has no order (`dag/rounds/sums.py`), so all come to the same bits.

    [weight, length, a contribution to the part as its giver wrote it] for each giver
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from ...compression.codec import CodecError
from ...dag.rounds.sums import WeightedSum
from ...dag.rounds.vector import Span
from ...proto import broker_pb2
from .coding import PartCoding

__all__ = ["FRONT_BYTES", "most_bytes", "side_by_side", "total_of"]

_FRONT = struct.Struct("<QQ")
FRONT_BYTES = _FRONT.size
"""What stands in front of each contribution."""


def side_by_side(given: Iterable[tuple[int, Sequence[memoryview]]]) -> tuple[memoryview, ...]:
    """`given`: by giver, the weight and the bytes."""
    found: list[memoryview] = []
    for weight, buffers in given:
        size = sum(b.nbytes for b in buffers)
        found += (memoryview(_FRONT.pack(weight, size)), *buffers)
    return tuple(found)


def most_bytes(part: Span, coding: PartCoding, plan: broker_pb2.RoundPlan) -> int:
    """The most that they can take."""
    return plan.members * (FRONT_BYTES + coding.most_bytes(part))


def total_of(
    data: memoryview, part: Span, coding: PartCoding, plan: broker_pb2.RoundPlan
) -> WeightedSum:
    """Raises CodecError or LargeContributionError."""
    integers = coding.vector.integers(part)
    found = WeightedSum(part[1] - part[0], plan.weight, plan.exponent, integers)
    at = weights = 0
    while at + FRONT_BYTES <= len(data):
        weight, size = _FRONT.unpack_from(data, at)
        at += FRONT_BYTES
        weights += weight
        if weights > plan.weight:
            break
        found.add(coding.decode(part, data[at : at + size]), weight)
        at += size
    if (at, weights) != (len(data), plan.weight):
        raise CodecError(
            f"{len(data)} bytes of contributions that weigh {weights}: expected {at} that weigh "
            f"{plan.weight}"
        )
    return found
