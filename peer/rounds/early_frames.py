"""Frames of an attempt that is not known here yet: how many of a peer are kept, and how large one
may be."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ...dag.execute.execute import TensorSpecError
from ...dag.rounds.vector import PIECE, RunVector
from ...dag.rounds.wiring import GIVE, RESULT, VERSION, blocks_of, span_of
from ...net.links.frame import Arrived, FrameKey
from .coding import PartCoding, flat_spec
from .side_by_side import SideBySide

__all__ = ["MOST_EARLY", "EarlyFrames", "most_of_any"]

MOST_EARLY = 8
"""Frames of one peer that wait for their attempt: twice as many as a link has slots for."""
_MOST_FRONT = 1 << 16
"""What stands in front of a part's pieces."""


class EarlyFrames:
    """Frames that came before their attempt was joined, a few of each peer. For any thread."""

    def __init__(self) -> None:
        self._kept: dict[FrameKey, Arrived] = {}
        self._lock = threading.Lock()

    def keep(self, arrived: Arrived) -> None:
        """Raises TensorSpecError for one too many of a peer."""
        key = arrived.key
        with self._lock:
            mine = sum(k.source == key.source for k in self._kept)
            if key not in self._kept and mine >= MOST_EARLY:
                raise TensorSpecError(
                    f"{key}: {mine} frames of {key.source} wait for an attempt already, of "
                    f"{MOST_EARLY} that may"
                )
            self._kept[key] = arrived

    def take(self, number: tuple[int, int]) -> list[Arrived]:
        """Return the frames of an attempt, and forget them and those of earlier ones."""
        with self._lock:
            kept, self._kept = self._kept, {}
            for key, arrived in kept.items():
                if (key.step, key.term) > number:
                    self._kept[key] = arrived
        return [a for k, a in kept.items() if (k.step, k.term) == number]

    def pop(self, key: FrameKey) -> None:
        """Forget a frame that nobody wants any more."""
        with self._lock:
            self._kept.pop(key, None)


def most_of_any(
    key: FrameKey, vector: RunVector, codings: Mapping[int, PartCoding], most_rows: int = 0
) -> int:
    """The most bytes that a frame can have whatever its plan says, of an attempt that is not known
    here: it is of one part. `codings`: those of rounds as ever, by hop; `most_rows`: as in
    `RoundSettings`."""
    start, stop = part = span_of(key.port)
    if not 0 <= start < stop <= vector.elements or stop - start > PIECE or key.hop not in codings:
        return 0
    most = codings[key.hop].most_bytes(part)
    if key.hop == GIVE and most_rows:
        return len(blocks_of(part, most_rows)[0]) * flat_spec(stop - start).size_bytes
    if key.hop == VERSION or isinstance(codings[RESULT], SideBySide):
        return most  # every round has them alike
    return max(most, flat_spec(stop - start).size_bytes + _MOST_FRONT)  # another coding by then
